"""Machines of blocks, written by a policy and scored by physics."""
