"""Extract the answer to a mathematical question and grade it."""
