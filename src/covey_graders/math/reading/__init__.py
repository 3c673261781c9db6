"""What a text says: its spelling, numbers, units, words and names."""
