"""Kernels in C for CPUs, with the Python that calls them."""
