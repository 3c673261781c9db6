"""Check a saved model: causal, complete, with a row per token."""

import re
from contextlib import suppress
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from covey.policy.models.text_part import auto_class
from covey.policy.settings import ModelConfig

HEADS = re.compile(r"For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice|RewardModel")


def read_weights(kind: Any, name: str, **keywords: Any) -> tuple[Any, str]:
    """Load a saved model, and name weights missing in its files.

    `kind` is an auto class of transformers, or "causal" or "masked".
    Transformers initialises those at random. Tied weights are saved once, and not lacking.
    """
    if isinstance(kind, str):
        config = AutoConfig.from_pretrained(name, revision=keywords.get("revision"), **NO_CODE)
        kind = auto_class(kind, config)
    keywords |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = kind.from_pretrained(name, **keywords)
    misshapen = [key for key, *_ in found["mismatched_keys"]]
    lacking = sorted({*found["missing_keys"], *misshapen})
    if not lacking:
        return model, ""
    named, how = ", ".join(lacking[:3]), "missing or of another shape" if misshapen else "missing"
    return model, (
        f"must hold all {len(model.state_dict())} weights of {type(model).__name__}, {len(lacking)} are {how} "
        f"({named}) and would be drawn at random: fetch its files again, or save the model whole"
    )


def refuse_encoder(settings: ModelConfig, config: PreTrainedConfig | None = None) -> None:
    """Refuse a bidirectional model, which transformers may load as causal. ValueError.

    Without `config` it is read from the folder or the hub.
    """
    with suppress(*UNREADABLE):  # loading says what is wrong
        config = config or AutoConfig.from_pretrained(settings.name, revision=settings.revision, **NO_CODE)
    if config is None:
        return
    saved = ", ".join(config.architectures or [config.model_type])
    if settings.kind == "causal" and HEADS.search(saved):
        raise ValueError(
            f"model.name={settings.name} must be a causal language model, got one that judges text ({saved}); "
            f"a reward is rewards=[{{function:reward_model,args:{{model:{settings.name}}}}}]"
        )
    decodes = getattr(config, "is_decoder", type(config) in AutoModelForCausalLM._model_mapping)
    if settings.kind != "causal" or decodes or type(config) not in AutoModelForMaskedLM._model_mapping:
        return
    raise ValueError(
        f"model.name={settings.name} must be a causal language model, got one that sees what follows ({saved}); "
        "model.kind=masked with engine=fill and environment=infill trains one"
    )


def refuse_rowless(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer with text tokens that have no embedding. ValueError.

    Special tokens are left to the preflight: some models have an image token that texts never hold.
    """
    rows, special = num_rows(model), {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    rowless = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows and i not in special}
    if rowless:
        raise ValueError(
            f"model.name={name} must have an embedding for every token, got {len(tokenizer)} tokens and {rows} rows "
            f"(none for {rowless[min(rowless)]!r}): model.resize_token_embeddings({max(rowless) + 1}), and save it"
        )


def num_rows(model: PreTrainedModel) -> int:
    """Count the embedding's rows, which may exceed the tokenizer's tokens."""
    embeddings = model.get_input_embeddings()
    if embeddings is None:  # a module that looks tokens up in a way of its own
        return int(model.config.vocab_size)
    weight = embeddings.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError),
    *(ImportError, SafetensorError, StrictDataclassError),
)
"""Exceptions of transformers for files of unexpected content."""
NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Code beside weights is never run. Left out, transformers would ask at the terminal."""
