"""How long a GRPO step takes here, beside other libraries and beside what the machine could do.

`python -m benchmarks table | curves | gpu`; see benchmarks/README.md.
"""
