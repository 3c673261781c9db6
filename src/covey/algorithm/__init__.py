"""From rewards to advantages, and from log-probs to a loss."""
