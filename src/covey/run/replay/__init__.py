"""Runs once more, by what they wrote of themselves."""
