"""Check instructions of IFEval (arXiv 2311.07911) in a text."""
