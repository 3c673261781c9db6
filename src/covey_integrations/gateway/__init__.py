"""A loopback server with the OpenAI chat API for agent programs."""
