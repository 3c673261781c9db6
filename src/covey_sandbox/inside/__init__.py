"""Runs in processes of its own: judge, zygote, program. Imports the standard library and nothing outside of here."""
