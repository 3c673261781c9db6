"""Sample any causal model of transformers through its own cache."""
