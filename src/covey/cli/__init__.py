"""The command: from words to a checked configuration, and errors in one line."""
