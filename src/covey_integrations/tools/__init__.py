"""Tools that a policy calls, and the episodes with them."""
