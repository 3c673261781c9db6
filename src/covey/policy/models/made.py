"""Models that a function of the user makes, and their code."""

import copy
import hashlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from covey.policy.own import own_model, unwrap
from covey.policy.own_tokenizer import own_tokenizer
from covey.policy.settings import ModelConfig
from covey.system.jsonl import read_object
from covey.system.lookup import attribute, describe, is_foreign, resolve

ORIGIN = "made_from"
"""Entry of a saved config.json: the name that the function made the model of when its run began."""

MAKER = "made_by"
"""Attribute of a model: the module of the function that made it."""


def make_model(settings: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make model and tokenizer by the function `model.code`.

    It gets `model.name`, where it takes an argument. For a saved policy it makes the model of the run's
    beginning, which takes the saved weights. ValueError where the function raises or makes something else.
    """
    assert settings.code is not None, "a function makes the model"
    origin = _origin(Path(settings.name))
    name = os.path.expanduser(settings.name if origin is None else origin)
    if origin is not None and os.path.isabs(name) and not os.path.exists(name):
        raise ValueError(f"model.name={settings.name} needs {name} too, the file that its run made the module of")
    name = os.path.abspath(name) if os.path.exists(name) else name  # a saved policy is read from anywhere
    function = resolve(settings.code, {})
    try:
        made = function(name) if inspect.signature(function).parameters else function()
    except Exception as error:  # the user's code
        raise ValueError(f"model.code={settings.code} {describe(error)}") from error
    given = unwrap(made[0]) if isinstance(made, tuple | list) and len(made) == 2 else None
    if not isinstance(given, nn.Module) or hasattr(given, "peft_config"):
        kind = type(made if given is None else given).__name__
        raise ValueError(f"model.code={settings.code} must return (module, tokenizer), got {kind}")
    model = given if isinstance(given, PreTrainedModel) else own_model(given)
    tokenizer = own_tokenizer(made[1], int(model.config.get_text_config(decoder=True).vocab_size))
    if origin is not None:
        _load_saved(model, Path(settings.name))
    model.name_or_path = model.config.name_or_path = name
    setattr(model.config, ORIGIN, name)
    vars(model)[MAKER] = function.__module__
    return model, tokenizer


def _origin(folder: Path) -> str | None:
    """Return the name that a saved policy's model was made of."""
    found = read_object(folder / "config.json").get(ORIGIN)
    return found if isinstance(found, str) else None


def _load_saved(model: PreTrainedModel, folder: Path) -> None:
    weights = {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}
    known = dict(model.named_parameters(remove_duplicate=False))
    given = {id(known[name]) for name in weights.keys() & known.keys()}
    lacking = [name for name, weight in known.items() if id(weight) not in given]
    misshapen = [name for name in weights.keys() & known.keys() if weights[name].shape != known[name].shape]
    unknown = sorted(weights.keys() - model.state_dict().keys())
    if wrong := [*lacking, *misshapen, *unknown]:
        raise ValueError(f"model.name={folder} does not hold the weights of {type(model).__name__} ({wrong[0]})")
    model.load_state_dict(weights, strict=False)


def restore_buffers(model: PreTrainedModel) -> None:
    """Compute unsaved buffers as the class does.

    Transformers makes a model without storage before it reads the weights, which code beside them may not expect.
    """
    with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        fresh = type(model)._from_config(copy.deepcopy(model.config))
    for module, own in zip(model.modules(), fresh.modules(), strict=True):
        for name in module._non_persistent_buffers_set:
            held, made = module._buffers[name], own._buffers[name]
            module._buffers[name] = made if held is None or made is None else made.to(held.device)


def code_hashes(model: nn.Module) -> dict[str, str]:
    """Return hashes of the user's code in a model, by file.

    {} where all of it is of installed packages. Files are followed through their imports; of a program or a notebook
    the model's classes count alone, by name.
    """
    kinds = {type(part) for part in (vars(model).get("given", model), *model.modules())}
    texts: dict[str, set[str]] = {}
    for kind in kinds:
        if kind.__module__ == "__main__":
            with suppress(OSError, TypeError):  # typed at a prompt
                texts.setdefault(kind.__qualname__, set()).add(inspect.getsource(kind))
    for file in _files({kind.__module__ for kind in kinds} | {vars(model).get(MAKER, "")}):
        texts.setdefault(file.name, set()).add(file.read_text(encoding="utf-8", errors="replace"))
    joined = {name: "\0".join(sorted(parts)).encode() for name, parts in sorted(texts.items())}
    return {name: hashlib.sha256(text).hexdigest()[:12] for name, text in joined.items()}


def _files(names: set[str]) -> Iterator[Path]:
    """Yield the user's files of modules and their imports."""
    waiting, seen = set(names), {"__main__"}
    while waiting:
        seen.add(name := waiting.pop())
        module = sys.modules.get(name)
        file = None if module is None else vars(module).get("__file__")
        if module is None or not str(file).endswith(".py") or is_foreign(str(file)):
            continue
        yield Path(str(file))
        waiting |= {found for value in list(vars(module).values()) if (found := _home(value)) is not None} - seen


def _home(value: Any) -> str | None:
    found = value.__name__ if isinstance(value, ModuleType) else attribute(value, "__module__")
    return found if isinstance(found, str) else None
