"""Audit a grader: respelt right answers, and known tricks."""
