"""Models that a function of the user makes, and their code."""

import copy
import inspect
import os
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from covey.policy.own import own_model, unwrap
from covey.policy.own_tokenizer import own_tokenizer
from covey.policy.settings import ModelConfig
from covey.system.custom import source_hashes
from covey.system.jsonl import read_object
from covey.system.lookup import describe, resolve

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
    """Return hashes of the user's code in a model, by file."""
    kinds = {type(part) for part in (vars(model).get("given", model), *model.modules())}
    return source_hashes(kinds, {vars(model).get(MAKER, "")})
