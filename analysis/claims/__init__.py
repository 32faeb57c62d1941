"""Every checkable claim of the lecture, checked on a given model.

A claim is a function in one of the modules that follow the lecture's sections; its docstring is the mathematics, so
that the modules can be read beside the lecture. What it returns says whether the claim holds of the model, does not
hold, or does not apply and why; empirical asides are measured, and nothing is claimed of them.
"""

from analysis.claims.claim import Claim, Finding
from analysis.claims.verdict import Verdict, Verification
from analysis.claims.verify import CLAIMS, find, verify

__all__ = ["CLAIMS", "Claim", "Finding", "Verdict", "Verification", "find", "verify"]
