"""What is rewarded: prompts, and what completions of them are worth."""
