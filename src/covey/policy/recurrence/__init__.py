"""Layers with a state in place of attention: what they compute, over any stream."""
