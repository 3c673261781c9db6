"""The command: from words to a checked configuration, with one-line errors."""
