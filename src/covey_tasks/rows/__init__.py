"""Made-up rows for reward functions, and the rewards of some."""
