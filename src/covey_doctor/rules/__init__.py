"""The tests behind findings, by subject: pure functions of columns."""
