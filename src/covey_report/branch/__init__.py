"""Children of a checkpoint, and their paired differences."""
