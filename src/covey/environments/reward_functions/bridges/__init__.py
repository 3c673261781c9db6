"""covey's environments as judges inside other trainers."""
