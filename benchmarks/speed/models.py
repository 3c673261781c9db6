"""Random models and their tokenizer, saved once so that all contestants load the same files."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from benchmarks.speed.workloads import Workload

MAX_LENGTH = 4096


def saved_model(workload: Workload, folder: Path) -> str:
    """The folder of this workload's model, made if it is not there."""
    target = folder / workload.model_key
    if not (target / "tokenizer.json").exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(model_config(workload), dtype=torch.float32)
        model.save_pretrained(target)
        word_tokenizer(workload.shape.vocabulary).save_pretrained(target)
    return str(target)


def model_config(workload: Workload) -> PreTrainedConfig:
    """The stop token lies outside the vocabulary, so it is never sampled and nobody pays for suppressing it."""
    shape = workload.shape
    return AutoConfig.for_model(
        shape.kind,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=shape.tied,
        head_dim=shape.head_width,
        bos_token_id=None,
        eos_token_id=shape.vocabulary,
        pad_token_id=0,
    )


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Token i is the word "ti"; the last one is the stop token."""
    words = {f"t{token}": token for token in range(vocabulary)} | {"<end>": vocabulary}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="t0",
        eos_token="<end>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
