"""Text for people: numbers, escapes, secrets."""
