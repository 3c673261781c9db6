"""Prompts that leave a policy no room to answer: found by id before the first step, not hours later."""

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from covey.rollouts.rollout import encode_prompt
from covey.types import Prompt

LOGGER = logging.getLogger(__name__)

TEMPLATE_TOKENS = 256
"""More than a chat template adds to one message."""
TOKENS_PER_CHARACTER = 4
"""No tokenizer needs more: a character has at most four bytes."""


def fitting(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Prompt]:
    """Return the prompts of at most `max_tokens` tokens. The others are named and counted in a warning."""
    long = [prompt for prompt in prompts if _num_tokens(prompt, tokenizer, max_tokens) > max_tokens]
    if not long:
        return list(prompts)
    names = ", ".join(prompt.id for prompt in long[:3]) + (", ..." if len(long) > 3 else "")
    LOGGER.warning("%d prompts have more than %d tokens and are skipped: %s", len(long), max_tokens, names)
    left_out = {prompt.id for prompt in long}
    return [prompt for prompt in prompts if prompt.id not in left_out]


def _num_tokens(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, enough: int) -> int:
    """Count tokens of a prompt, or return an upper bound where that is at most `enough`: most need not be tokenized to
    know."""
    turns = [prompt.text] if isinstance(prompt.text, str) else [str(dict(message)) for message in prompt.text]
    bound = sum(TOKENS_PER_CHARACTER * len(turn) + TEMPLATE_TOKENS for turn in turns)
    return bound if bound <= enough else len(encode_prompt(tokenizer, prompt))
