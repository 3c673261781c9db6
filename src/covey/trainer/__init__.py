"""From groups to an optimiser step."""
