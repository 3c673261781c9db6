"""Recomputing a run, and branches of one."""
