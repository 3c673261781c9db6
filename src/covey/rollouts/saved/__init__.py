"""Groups and their parts in files: checkpoints, and the journal between them."""
