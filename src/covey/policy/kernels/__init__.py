"""C for CPUs, beside the Python that calls it."""
