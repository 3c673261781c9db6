"""Environments: prompts, and rewards of their completions."""
