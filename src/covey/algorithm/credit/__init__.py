"""From rewards to advantages: scores, shaping, estimators, selection."""
