"""The gateway: a loopback server with the OpenAI chat API, by which an agent program trains as it is."""
