"""Waits: deadlines, the process that ends a run, signals, times."""
