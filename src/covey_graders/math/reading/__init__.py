"""Reading of text: spelling, numbers, units, words and names."""
