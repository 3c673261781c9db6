"""Simulation of machines."""
