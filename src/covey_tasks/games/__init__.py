"""Small games over several turns: guess a number, look things up, calculate in steps."""
