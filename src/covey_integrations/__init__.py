"""Play tools of MCP servers, environments of others, and agent programs."""
