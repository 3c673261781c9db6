"""Programs that are run: problems, and the sandbox's verdict on answers."""
