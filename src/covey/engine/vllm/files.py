"""Weights as files: vLLM's start folder, and later pushes."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from covey.engine.base import WeightSet
from covey.engine.weights import Shapes
from covey.policy.policy import Policy
from covey.system.disk import catch_write_errors

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
    """Save the model without adapters, and its tokenizer.

    ValueError where transformers save parameters under other names than the model's: such weights could not be pushed.
    """
    model = policy.causal_lm
    weights = {_plain(name): tensor for name, tensor in policy.model.state_dict().items() if ".lora_" not in name}
    with catch_write_errors(folder):
        model.save_pretrained(folder, state_dict=weights)
        policy.save_tokenizer(folder)
    # Its parameters must go by the names in the files: pushes name them so
    named = {_plain(name) for name, _ in policy.model.named_parameters() if ".lora_" not in name}
    if other := sorted(named ^ read_shapes(folder).keys()):
        raise ValueError(
            f"engine=vllm needs a model whose parameters are saved under their own names, {type(model).__name__} has "
            f"{len(other)} others ({', '.join(other[:3])}); use engine=native"
        )


def save_adapter(policy: Policy, folder: Path) -> None:
    """Save the trained adapter in peft's format."""
    with catch_write_errors(folder):
        policy.model.save_pretrained(folder)  # type: ignore[operator] # peft's


def _plain(name: str) -> str:
    return name.removeprefix(WRAPPED).replace(".base_layer", "")


@contextmanager
def push_folder(weights: WeightSet) -> Iterator[Path]:
    """Yield a temporary folder, in memory where the weights fit."""
    num_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
    folder = Path(tempfile.mkdtemp(prefix="covey-push-", dir=_roomy(num_bytes)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_push(weights: WeightSet, folder: Path, dtype: torch.dtype, adapter: Path | None = None) -> None:
    """Write pushed weights in the engine's type, or as an adapter.

    Raises WriteError where there is no room.
    """
    tensors = {_pushed_name(name): tensor.to(dtype).contiguous() for name, tensor in weights.tensors.items()}
    with catch_write_errors(folder):
        save_file(tensors, folder / (WEIGHTS if adapter is None else ADAPTER))
        if adapter is not None:
            shutil.copyfile(adapter / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)


def pushed_shapes(weights: WeightSet) -> Shapes:
    """Return the names of pushed weights in a file, with shapes."""
    return {_pushed_name(name): tuple(tensor.shape) for name, tensor in weights.tensors.items()}


def _pushed_name(name: str) -> str:
    """Return peft's file name of an adapter's parameter, other names unchanged."""
    return name.replace(".default.weight", ".weight") if ".lora_" in name else name


def _roomy(num_bytes: int) -> str | None:
    """Return the memory-backed disk where it has room, else None."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > num_bytes + SPARE
    return str(MEMORY) if has_room else None


def adapter_rank(folder: Path) -> int:
    return int(json.loads((folder / ADAPTER_CONFIG).read_text())["r"])
