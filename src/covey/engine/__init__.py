"""How tokens are sampled."""
