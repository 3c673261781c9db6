"""From rewards to advantages and from log-probs to a loss: tensors in, tensors out."""
