"""Load a saved model shard by shard: each rank its own rows.

No process holds the model whole. The files must be safetensors with the model's own names and shapes; what transformers
would convert (experts saved one by one, other formats, quantised weights) it loads itself.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.hub import cached_file

from covey.policy import sharding
from covey.policy.models.text_part import auto_class

LOGGER = logging.getLogger(__name__)
WHOLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    file: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model without storage, and the file of each of its weights."""

    model: PreTrainedModel
    tensors: Mapping[str, SavedTensor]
    """Tensors by name in the model, adapters left out; tied names lead to the same tensor."""

    def read(self) -> None:
        """Read this rank's rows of sharded weights, and buffers whole."""
        by_file: dict[str, list[tuple[Tensor, SavedTensor]]] = {}
        # Experts have a layer of adapters for each of their weights, one around the other
        own = {name.replace(".base_layer", ""): tensor for name, tensor in _named_tensors(self.model)}
        for name, saved in self.tensors.items():
            by_file.setdefault(saved.file, []).append((own[name], saved))
        for file, wanted in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for tensor, saved in wanted:
                    _fill(tensor, opened.get_slice(saved.name))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Report the weights' device as the host inside, for new adapters."""
        empty = {id(tensor): tensor for tensor in self.model.parameters()}
        seeming = {key: nn.Parameter(_without_room(tensor)) for key, tensor in empty.items()}
        _exchange(self.model, seeming)
        yield
        for key, parameter in seeming.items():
            empty[key].requires_grad_(parameter.requires_grad)
        _exchange(self.model, {id(parameter): empty[key] for key, parameter in seeming.items()})


def find_unread(kind: str, name: str, revision: str | None, how: Mapping[str, Any]) -> MetaModel | None:
    """Return the saved model `name` without its weights.

    `how` are the keywords of `from_config`. None where its files are not simply its weights, or cannot be read:
    transformers then loads it, or reports the error.
    """
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        is_quantised = getattr(config, "quantization_config", None) is not None
        saved = None if is_quantised else _saved_tensors(name, revision)
        if saved is None:
            return None
        model = _without_weights(auto_class(kind, config), config, how)
        if model.can_generate():
            with suppress(OSError):  # it need not have one
                model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
        tensors = _match(model, saved)
    except Exception as error:  # of foreign code and files: loaded whole, they tell what is wrong in their own words
        LOGGER.debug("%s is loaded whole: %r", name, error)
        return None
    if tensors is None:
        LOGGER.info("model.name=%s does not support sharded loading; every rank loads the full model", name)
        return None
    return MetaModel(model, tensors)


def _without_weights(kind: Any, config: PreTrainedConfig, how: Mapping[str, Any]) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = kind.from_config(config, **how)
    model.tie_weights()  # each parameter became a new object in its module
    return model.eval()


def _saved_tensors(name: str, revision: str | None) -> list[SavedTensor] | None:

    def find(file: str) -> str | None:
        return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)

    whole = find(WHOLE_FILE)
    files: list[str | None] = [whole]
    if whole is None:
        index = find(INDEX)
        if index is None:
            return None
        parts = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        files = [find(Path(part).name) for part in parts]
    return [tensor for file in files for tensor in _tensors_in(file or "")]


def _tensors_in(file: str) -> Iterator[SavedTensor]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 # no mapping
            yield SavedTensor(file, name, tuple(opened.get_slice(name).get_shape()))


def _match(model: PreTrainedModel, saved: list[SavedTensor]) -> dict[str, SavedTensor] | None:
    """Match weights with saved tensors by shape, None if incomplete."""
    names = model.state_dict().keys()
    own = {name: tensor for name, tensor in _named_tensors(model) if name in names}
    found = {_own_name(model, tensor.name, own): tensor for tensor in saved}
    if _is_converted(model, saved) or len(found) != len(saved) or not found.keys() <= own.keys():
        return None
    # Tied weights are saved once
    by_identity: dict[int, SavedTensor] = {}
    for name, tensor in found.items():
        if id(own[name]) in by_identity or tensor.shape != tuple(own[name].shape):
            return None
        by_identity[id(own[name])] = tensor
    if any(id(tensor) not in by_identity for tensor in own.values()):
        return None
    return {name: by_identity[id(tensor)] for name, tensor in own.items()}


def _own_name(model: PreTrainedModel, saved: str, own: Mapping[str, Tensor]) -> str:
    """Return a saved tensor's model name, with or without the base prefix."""
    prefix = f"{model.base_model_prefix}."
    names = (saved, prefix + saved, saved.removeprefix(prefix))
    return next((name for name in names if name in own), saved)


def _is_converted(model: PreTrainedModel, saved: list[SavedTensor]) -> bool:
    """Return True where transformers computes weights from the saved ones."""
    steps = [step for step in get_model_conversion_mapping(model) if getattr(step, "operations", None)]
    return any(step.rename_source_key(tensor.name)[1] is not None for step in steps for tensor in saved)


def _named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _without_room(tensor: Tensor) -> Tensor:
    """Return zeros of the same shape that share one number in memory."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _exchange(model: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in others:
                module._parameters[key] = others[id(parameter)]


@torch.no_grad()
def _fill(tensor: Tensor, rows: Any) -> None:
    """Copy this rank's rows from disk, all rows of an unsharded tensor."""
    if not sharding.is_shard(tensor):
        tensor.copy_(rows[...])
        return
    first, end = sharding.own_rows(tensor.shape[0])
    local = tensor.to_local()  # type: ignore[attr-defined] # a DTensor's
    if end > first:
        local.copy_(rows[first:end])
