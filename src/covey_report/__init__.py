"""Pages, text and pictures of runs, and plans of runs to come."""
