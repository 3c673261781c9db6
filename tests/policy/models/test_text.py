"""What a model is tried on is text that its tokenizer could have made: special, unused and byte tokens have no part."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from covey.policy.models.text import TEXT, ordinary_ids, special_ids
from covey.policy.policy import Policy

from ...engine.tiny import tiny_policy

UNUSED = [f"<unused{number}>" for number in range(900)]


def with_words(**how: Any) -> Policy:
    """A policy whose first tokens are special, unused ones and bytes, as in Gemma, StarCoder and Llama 2."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1400,
        special_tokens=["<pad>", "<bos>", *UNUSED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    if how.pop("begins", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    policy = tiny_policy("llama")
    policy.causal_lm.config.vocab_size = tokenizer.get_vocab_size()
    return replace(policy, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", **how))


@pytest.mark.parametrize("begins", [False, True])
def test_a_word_tokenizers_probe_text_begins_as_it_begins_texts(begins: bool) -> None:
    policy = with_words(begins=begins, bos_token="<bos>")
    ids = ordinary_ids(policy, 32)
    assert len(ids) == 32
    assert (ids[0] == 1) == begins
    assert not special_ids(policy).intersection(ids[begins:])
    assert TEXT.startswith(policy.tokenizer.decode(ids, skip_special_tokens=True).strip())


def test_a_tokenizer_of_few_tokens_gives_any_but_special_ones() -> None:
    policy = tiny_policy("llama")
    policy.causal_lm.config.pad_token_id = 200
    ids = ordinary_ids(policy, 40)
    assert len(set(ids)) == 40
    assert not (special_ids(policy) | {200}).intersection(ids)


def test_a_vocabulary_that_is_cut_short_gives_tokens_that_have_an_embedding() -> None:
    policy = with_words()
    policy.causal_lm.config.vocab_size = 950
    assert max(ordinary_ids(policy, 32)) < 950
