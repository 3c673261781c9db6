"""Graders of mathematics side by side."""
