"""Doors for environments that others wrote, each in a file of its own, their packages imported when one is built."""
