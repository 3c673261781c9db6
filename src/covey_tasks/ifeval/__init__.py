"""Instructions that a program can check: IFEval, arXiv 2311.07911.

verdicts.py judges a response, by the checks of instructions.py; rewards.py makes a reward of it; generator.py makes
prompts that are not among the benchmark's 541.
"""
