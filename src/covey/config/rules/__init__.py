"""Rules between settings, by subject."""
