"""Checks that a program makes of a text: words, marks, layout, language."""
