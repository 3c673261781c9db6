"""Formulas in LaTeX as trees: words, nodes, canonical forms, relations."""
