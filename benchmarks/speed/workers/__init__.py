"""The contestants, a process each; vLLM's must not import covey."""
