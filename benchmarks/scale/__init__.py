"""What runs of several processes and whole clusters take: measured, modelled and planned."""
