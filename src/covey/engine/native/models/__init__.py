"""Base models of known families as decoding reads them: through C on a CPU, joined and compiled on a GPU."""
