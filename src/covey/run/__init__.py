"""One run: what it is built of, its stages, what it leaves behind."""
