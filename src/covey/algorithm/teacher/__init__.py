"""A teacher: its terms of the objective, and their settings."""
