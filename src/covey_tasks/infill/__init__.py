"""Texts with masked tokens, and the learned judge of their fills."""
