"""Environments of five kinds of task: prompts, rows and rewards of each. The core reaches them by name alone."""
