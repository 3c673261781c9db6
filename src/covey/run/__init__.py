"""One run: its parts, stages and records."""
