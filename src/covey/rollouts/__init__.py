"""From prompts to groups of rollouts: order, sampling, scoring."""
