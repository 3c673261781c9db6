"""What policies compute on a GPU besides products and attention, through Liger or compiled by torch."""
