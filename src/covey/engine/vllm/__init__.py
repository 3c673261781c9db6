"""The vLLM engine, in this process or at an address."""
