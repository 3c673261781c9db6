"""Drawings and films of machines."""
