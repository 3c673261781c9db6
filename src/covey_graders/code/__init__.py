"""Which program a completion hands in, and the tests of a data set's row."""
