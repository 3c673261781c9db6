"""Attention over packed streams, in several implementations."""
