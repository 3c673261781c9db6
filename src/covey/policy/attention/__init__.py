"""Who attends to whom in a packed stream, and ways to compute it."""
