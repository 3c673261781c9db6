"""Before a run: whether it fits, how long it takes and what it costs, on named GPUs and on this machine."""
