"""Environments that OpenEnv serves, over its own wire."""
