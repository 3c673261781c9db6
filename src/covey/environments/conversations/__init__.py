"""Small multi-turn tasks for a model of a million parameters."""
