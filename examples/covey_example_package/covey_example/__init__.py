"""Adds an environment, a verb and a callback to covey."""
