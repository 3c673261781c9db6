"""Engines, which sample tokens."""
