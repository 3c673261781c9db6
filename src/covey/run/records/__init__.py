"""What a run logs, shows and sums up."""
