"""Known base models for decoding: in C on a CPU, joined and compiled on a GPU."""
