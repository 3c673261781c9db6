"""covey: GRPO post-training of language models from verifiable rewards."""

__version__ = "0.1.0"
