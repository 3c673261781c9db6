"""Play environments of others: OpenEnv, verifiers, Gymnasium, TextArena, reasoning_gym, and agent programs."""
