"""Countdown: arithmetic expressions of given numbers that reach a target."""
