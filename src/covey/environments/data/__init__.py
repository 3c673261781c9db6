"""Rows of data sets, read from files, folders, the hub and functions."""
