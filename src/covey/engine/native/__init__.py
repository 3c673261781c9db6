"""The engine in the trainer's own process."""
