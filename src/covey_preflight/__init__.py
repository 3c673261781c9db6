"""Checks on the user's model and settings before the first step."""
