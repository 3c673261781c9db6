"""Small games over several turns: guess a number, look up words, calculate."""
