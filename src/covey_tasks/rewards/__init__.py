"""Ready-made reward functions."""
