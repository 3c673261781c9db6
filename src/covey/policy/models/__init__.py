"""Models from disk, from the hub or randomly initialised."""
