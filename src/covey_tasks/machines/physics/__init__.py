"""How machines are simulated."""
