"""Which answer a completion gives to a mathematical question, and whether it is right."""
