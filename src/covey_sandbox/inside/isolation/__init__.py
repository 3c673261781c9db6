"""Isolation: namespaces, Landlock, system call filters, users, and their checks."""
