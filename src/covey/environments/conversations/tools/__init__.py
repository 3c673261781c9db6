"""Tools that a policy calls: functions with type hints and a docstring, and the episodes in which it does."""
