"""Check a saved model: causal, complete, with a row per token."""

import json
import re
from contextlib import suppress
from pathlib import Path
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
from transformers import __version__ as transformers_version

from covey.policy.models.text_part import auto_class
from covey.policy.own import OwnConfig
from covey.policy.settings import FOLDER, ModelConfig
from covey.system.text.format import first_line

HEADS = re.compile(r"For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice|RewardModel")


def read_weights(kind: Any, name: str, **keywords: Any) -> tuple[Any, str]:
    """Load a saved model, and name weights missing in its files.

    `kind` is an auto class of transformers, or "causal" or "masked".
    Transformers initialises those at random. Tied weights are saved once, and not lacking.
    """
    if isinstance(kind, str):
        trusted = {"trust_remote_code": keywords.get("trust_remote_code", False)}
        config = AutoConfig.from_pretrained(name, revision=keywords.get("revision"), **trusted)
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


def explain_unreadable(settings: ModelConfig, error: Exception, lacking: str = "") -> str:
    """Say in one line what is not loaded, and why."""
    what = "directory" if Path(settings.name).exists() else "directory or reachable hub model"
    reason = first_line(error)
    if "trust_remote_code" in str(error):
        by_word = "model.code=folder" if what == "directory" else OF_HUB.format(settings.name)
        reason = f"it needs code of its own, which runs by your word alone: {by_word}"
    elif f"`{OwnConfig.model_type}`" in str(error):
        reason = "it holds the weights of a module, which model.code=module:function makes"
    elif str(error).startswith("Couldn't instantiate the backend tokenizer"):
        reason = SAVE_TOKENIZER
    elif unknown := re.search(r"model type `(\w+)` but Transformers does not recognize", str(error)):
        reason = f"transformers {transformers_version} knows no model of type {unknown[1]}"
    elif re.match(r"[A-Za-z]:\w|.*\\", settings.name):
        reason = "backslashes are the shell's: quote the name, or write /"
    elif other := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)Config'>", str(error)):
        reason = f"{other[1]} is another kind: an encoder and a decoder, or a model of pictures or sound"
    return f"model.name={settings.name} {lacking or f'is no {what} of a {settings.kind} language model'} ({reason})"


def refuse_encoder(settings: ModelConfig, config: PreTrainedConfig | None = None) -> None:
    """Refuse a bidirectional model, which transformers may load as causal. ValueError.

    Without `config` it is read from the folder or the hub.
    """
    with suppress(*UNREADABLE):  # loading says what is wrong
        trusted = trusted_code(settings)
        config = config or AutoConfig.from_pretrained(settings.name, revision=settings.revision, **trusted)
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


def trusted_code(settings: ModelConfig) -> dict[str, Any]:
    """Return the keyword of transformers for code beside weights."""
    return {"trust_remote_code": settings.code == FOLDER}


def check_code(settings: ModelConfig) -> None:
    """Refuse code of a hub where `model.code` trusts a folder's. ValueError."""
    if settings.code != FOLDER:
        return
    if not Path(settings.name).is_dir():
        raise ValueError(f"model.code={FOLDER} runs code that lies here: {OF_HUB.format(settings.name)}")
    beside = code_beside(settings.name)
    if not beside:
        raise ValueError(f"model.code={FOLDER} runs code beside the weights, {settings.name} names none (auto_map)")
    for file, named in beside.items():
        if "--" in str(named):
            raise ValueError(f"model.code={FOLDER} runs code of the folder alone, {file} names that of a hub: {named}")


def code_beside(name: str) -> dict[str, Any]:
    """Return the code that files of a folder name, {} for none."""
    found: dict[str, Any] = {}
    for file in ("config.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError, AttributeError):
            found[file] = json.loads((Path(name) / file).read_text(encoding="utf-8")).get("auto_map")
    return {file: named for file, named in found.items() if named}


SAVE_TOKENIZER = "there is no tokenizer.json that holds tokens, and tokenizer.save_pretrained(FOLDER) writes one"
OF_HUB = "hf download {0} --local-dir FOLDER, read its files, then model.name=FOLDER model.code=folder"
UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError),
    *(ImportError, SafetensorError, StrictDataclassError),
)
"""Exceptions of transformers for files of unexpected content."""
NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Code beside weights is not run without the user's word, `model.code=folder`."""
