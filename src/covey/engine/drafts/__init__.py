"""Tokens that rows may write next, verified several at a time."""
