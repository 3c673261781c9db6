"""Plan memory, time and cost of a run."""
