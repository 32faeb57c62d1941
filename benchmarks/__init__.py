"""What this toolkit costs, beside plain PyTorch and TransformerLens, measured in one process.

``python -m benchmarks`` prints a table and writes JSON. A module here offers `rows(full)`, which yields `Row`s.
"""
