"""Judge answers, prints and asserts: compare and show values."""
