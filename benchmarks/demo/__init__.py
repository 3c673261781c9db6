"""Does training learn, on every seed, and only from its rewards? `python -m benchmarks.demo`, and one module a task."""
