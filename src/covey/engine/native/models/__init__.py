"""Known base models for decoding, on CPU and GPU."""
