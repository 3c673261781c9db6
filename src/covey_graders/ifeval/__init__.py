"""Whether a text follows instructions that a program can check (IFEval, arXiv 2311.07911)."""
