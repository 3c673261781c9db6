"""Replay of asynchronous runs from their records."""
