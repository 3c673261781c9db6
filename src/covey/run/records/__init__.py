"""Logs, terminal output and summary of a run."""
