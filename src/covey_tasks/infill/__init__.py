"""Texts with masked tokens, and the learned judge that scores them filled in."""
