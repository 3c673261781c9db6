"""Ordinary text to probe a model with.

On token ids in arbitrary order a pretrained model is chaotic in half precision: a vocabulary begins with special,
unused and single-byte tokens.
"""

from covey.policy.policy import Policy

TEXT = (
    "The harbour was quiet in the morning. Two men carried a heavy table down the stone steps, and a child with a red "
    'coat counted the boats: one, two, three. "The water is higher than last year," said the older man. He looked at '
    "the clouds over the hills and put the table down. After lunch they went back to the town, bought bread, milk and "
    "seven apples, and talked about the winter that would soon be there."
)
SMALLEST_VOCABULARY = 1000
"""Smallest vocabulary of a tokenizer that knows words; below it, any token is as ordinary as the next."""
STRIDE = 0.3819
"""Step through a small vocabulary as a share of it, the golden section: tokens come from all over it."""


def ordinary_ids(policy: Policy, length: int) -> list[int]:
    """Return at most `length` token ids of an ordinary text.

    For a tokenizer that knows no words, ids from the middle of the vocabulary.
    """
    config, tokenizer = policy.causal_lm.config.get_text_config(decoder=True), policy.tokenizer
    size = min(int(config.vocab_size), len(tokenizer))
    left_out = special_ids(policy) | {getattr(config, "pad_token_id", None)}
    own = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"]) if size >= SMALLEST_VOCABULARY else []
    if own and len(own) >= length and max(own) < size and not left_out.intersection(own):
        return list(tokenizer(TEXT)["input_ids"])[:length]
    ordinary = [token_id for token_id in range(size) if token_id not in left_out] or list(range(size))
    return [ordinary[int(len(ordinary) * ((0.5 + STRIDE * place) % 1))] for place in range(length)]


def special_ids(policy: Policy) -> set[int]:
    """Return the tokens that decode(skip_special_tokens=True) drops.

    Llama 3's tokenizer names two of its 256 special tokens.
    """
    marked = {number for number, token in policy.tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(policy.tokenizer.all_special_ids)
