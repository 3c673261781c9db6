"""How machines are written and put together."""
