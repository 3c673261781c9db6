"""Functions of a notebook or script, known to this process alone."""
