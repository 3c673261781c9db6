"""Machines of blocks: a language model writes how they are put together, physics says what they are worth."""
