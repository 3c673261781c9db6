"""vLLM: an engine of another program, in this process or at an address."""
