"""The geometry of norms, blocks and the stream, measured: the lecture's sections 2 to 4 on a given model.

Jacobians are exact (automatic differentiation at the model's own precision). What is sampled says so, and from how many
draws.
"""

from analysis.geometry.bandwidth import StreamBandwidth, stream_bandwidth
from analysis.geometry.copies import private_copy
from analysis.geometry.diversity import HeadDiversity, head_diversity
from analysis.geometry.euler import EulerSteps, euler_steps
from analysis.geometry.gradient_path import GradientPath, gradient_path
from analysis.geometry.hull import HullMembership, hull_membership
from analysis.geometry.jacobians import BlockJacobians, block_jacobians, pullbacks, sequence_jacobian
from analysis.geometry.layernorm import (
    BatchDependence,
    NormGeometry,
    batch_dependence,
    norm_geometry,
    norm_inputs,
    normalised,
)
from analysis.geometry.updates import UpdateSizes, update_sizes
from analysis.geometry.weight_decay import ScaleInvariance, scale_invariance

__all__ = [
    "BatchDependence",
    "BlockJacobians",
    "EulerSteps",
    "GradientPath",
    "HeadDiversity",
    "HullMembership",
    "NormGeometry",
    "ScaleInvariance",
    "StreamBandwidth",
    "UpdateSizes",
    "batch_dependence",
    "block_jacobians",
    "euler_steps",
    "gradient_path",
    "head_diversity",
    "hull_membership",
    "norm_geometry",
    "norm_inputs",
    "normalised",
    "private_copy",
    "pullbacks",
    "scale_invariance",
    "sequence_jacobian",
    "stream_bandwidth",
    "update_sizes",
]
