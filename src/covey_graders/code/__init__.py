"""Extract programs from completions, and tests from data sets' rows."""
