"""The tests behind the findings, pure functions of a run's columns, by what they are about."""
