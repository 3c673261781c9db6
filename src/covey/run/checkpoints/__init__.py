"""What is saved of a run, and how it is resumed."""
