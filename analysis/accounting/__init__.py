"""Parameters, floating-point operations and memory in closed form.

Nothing is run and nothing is allocated: every number follows from the configuration. Tests hold the parameters equal to
``numel()`` and the operations equal to PyTorch's own counter.
"""

from analysis.accounting.memory import CacheMemory, activation_shape, cache_memory
from analysis.accounting.operations import FlopCount, crossover_length, flops, non_embedding_parameters
from analysis.accounting.parameters import HasConfig, ParameterTable, config_of, parameter_count, parameter_table
from analysis.accounting.splits import HeadSplit, compare_head_splits

__all__ = [
    "CacheMemory",
    "FlopCount",
    "HasConfig",
    "HeadSplit",
    "ParameterTable",
    "activation_shape",
    "cache_memory",
    "compare_head_splits",
    "config_of",
    "crossover_length",
    "flops",
    "non_embedding_parameters",
    "parameter_count",
    "parameter_table",
]
