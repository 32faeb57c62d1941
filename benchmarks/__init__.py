"""What this toolkit costs, beside plain PyTorch and TransformerLens, measured in one run.

``python -m benchmarks`` prints a table and writes JSON. A module here offers `rows(full)`, which yields `Row`s; those
against a library that is not installed are left out.
"""
