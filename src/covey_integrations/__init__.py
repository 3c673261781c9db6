"""Play tools of MCP servers, environments of others (OpenEnv, verifiers, TextArena), and agent programs."""
