"""Tasks: pairs of prompts with known answers, made here or read from a JSON-lines file."""

from analysis.tasks.generators import GENERATORS, greater_than, indirect_object, repeated_tokens
from analysis.tasks.pairs import PromptPairs, pairs_of, read_pairs

__all__ = [
    "GENERATORS",
    "PromptPairs",
    "greater_than",
    "indirect_object",
    "pairs_of",
    "read_pairs",
    "repeated_tokens",
]
