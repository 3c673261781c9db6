"""Layers with a state, over streams of segments."""
