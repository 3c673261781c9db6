"""Weights as files: vLLM's start folder, and later pushes."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from covey.engine.weights import Shapes, trained_tensors
from covey.policy.policy import Policy
from covey.system.disk import catch_write_errors

Tensors = Mapping[str, Tensor]

MEMORY = Path("/dev/shm")
"""A disk in memory, where the machine has one."""
WRAPPED = "base_model.model."
"""Prefix that peft puts before the names of the model that it wraps."""
WEIGHTS = "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
SPARE = 64 << 20
"""Bytes left free on the disk in memory: others write there too, and Docker gives it 64 MB by default."""


def read_shapes(path: Path) -> Shapes:
    """Return the names and shapes of safetensors files, without reading tensors."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found: Shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


def save_policy(policy: Policy, folder: Path) -> None:
    """Save the model without adapters, and its tokenizer."""
    weights = {_plain(name): tensor for name, tensor in policy.model.state_dict().items() if ".lora_" not in name}
    with catch_write_errors(folder):
        policy.causal_lm.save_pretrained(folder, state_dict=weights)
        policy.save_tokenizer(folder)


def as_saved(policy: Policy) -> Callable[[Tensors], Tensors]:
    """Return a function from trained weights to those of a saved folder.

    Transformers save some classes under other names than their parameters', and some parameters in parts. Weights that
    are not trained are added: vLLM loads a whole model.
    """
    model, trained = policy.causal_lm, {id(tensor): name for name, tensor in trained_tensors(policy).items()}
    every = model.state_dict(keep_vars=True)
    places = {name: trained.get(id(tensor)) for name, tensor in every.items()}
    kept = {name: every[name].detach() for name, place in places.items() if place is None}
    frozen = {name: tensor.clone() if policy.sharded else tensor for name, tensor in kept.items()}

    def convert(tensors: Tensors) -> Tensors:
        named = {name: frozen[name] if place is None else tensors[place] for name, place in places.items()}
        return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(named, model)))

    return convert


def save_adapter(policy: Policy, folder: Path) -> None:
    """Save the trained adapter in peft's format."""
    with catch_write_errors(folder):
        policy.model.save_pretrained(folder)  # type: ignore[operator] # peft's


def _plain(name: str) -> str:
    return name.removeprefix(WRAPPED).replace(".base_layer", "")


@contextmanager
def push_folder(tensors: Tensors) -> Iterator[Path]:
    """Yield a temporary folder, in memory where the weights fit."""
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    folder = Path(tempfile.mkdtemp(prefix="covey-push-", dir=_roomy(num_bytes)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_push(tensors: Tensors, folder: Path, dtype: torch.dtype, adapter: Path | None = None) -> None:
    """Write pushed weights in the engine's type, or as an adapter.

    Raises WriteError where there is no room.
    """
    cast = {_pushed_name(name): _cast(tensor, dtype).contiguous() for name, tensor in tensors.items()}
    with catch_write_errors(folder):
        save_file(cast, folder / (WEIGHTS if adapter is None else ADAPTER))
        if adapter is not None:
            shutil.copyfile(adapter / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _pushed_name(name: str) -> str:
    """Return peft's file name of an adapter's parameter, other names unchanged."""
    return name.replace(".default.weight", ".weight") if ".lora_" in name else name


def _roomy(num_bytes: int) -> str | None:
    """Return the memory-backed disk where it has room, else None."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > num_bytes + SPARE
    return str(MEMORY) if has_room else None


def adapter_rank(folder: Path) -> int:
    return int(json.loads((folder / ADAPTER_CONFIG).read_text())["r"])
