"""Environments of five kinds of task: prompts, rows and rewards."""
