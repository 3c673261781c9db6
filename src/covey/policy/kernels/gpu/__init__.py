"""GPU kernels besides products and attention: Liger's, or compiled by torch."""
