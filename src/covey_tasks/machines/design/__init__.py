"""Text and construction of machines."""
