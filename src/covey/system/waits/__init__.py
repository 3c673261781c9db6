"""Deadlines, the watchdog process, signals, times."""
