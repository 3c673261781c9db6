"""Reward functions of TRL's signature as an environment."""
