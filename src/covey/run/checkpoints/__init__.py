"""Checkpoints, and how a run is resumed."""
