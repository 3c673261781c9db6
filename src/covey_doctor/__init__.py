"""Diagnose a training run by its logs."""
