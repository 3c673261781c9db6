"""Environments of verifiers, played by a worker process with an interpreter of its own."""
