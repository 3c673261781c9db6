"""Functions of a notebook or a script that settings name, put here by `covey.train`: no other process has them."""
