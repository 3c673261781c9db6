"""Choose the engine: vLLM if installed beside a GPU."""

import copy
from dataclasses import dataclass
from importlib.util import find_spec

from covey.config.checks import format_value, unmet
from covey.config.schema import Config
from covey.policy.models.naming import OWN_MODULE
from covey.policy.settings import NANO
from covey.system import ranks


@dataclass(frozen=True, slots=True)
class HostDevices:
    """The available devices and engines."""

    has_vllm: bool
    num_gpus: int
    """GPUs that this process sees."""


def this_machine() -> HostDevices:
    """Look at this machine, importing torch only beside vLLM."""
    if find_spec("vllm") is None:
        return HostDevices(has_vllm=False, num_gpus=0)
    import torch

    return HostDevices(has_vllm=True, num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)


def obstacle_to_vllm(config: Config, machine: HostDevices) -> str | None:
    """Return the reason against vLLM for a run, None without one.

    >>> obstacle_to_vllm(Config(), Machine(has_vllm=False, num_gpus=1))
    'vLLM is not installed'
    """
    model, several = config.model, max(ranks.world_size(), config.devices.trainer) > 1
    reasons = (
        (not machine.has_vllm, "vLLM is not installed"),
        (machine.num_gpus == 0 or model.device == "cpu", "vLLM is chosen on a GPU only"),
        (model.kind != "causal", "vLLM does not fill in"),
        (model.name in NANO, f"model.name={model.name} is sampled before vLLM has started"),
        (model.code is not None, f"model.code={model.code} is code that vLLM does not have"),
        (model.name.startswith(OWN_MODULE), "vLLM loads models of transformers alone"),
        (model.deterministic, "vLLM does not repeat bit for bit, as model.deterministic=true asks"),
        (several and machine.num_gpus > 1, "vLLM needs CUDA_VISIBLE_DEVICES of one GPU for each process"),
    )
    return next((reason for holds, reason in reasons if holds), None) or _refusal(config)


def _refusal(config: Config) -> str | None:
    """Return the first condition that holds now and would not with vLLM."""
    with_vllm = copy.deepcopy(config)
    with_vllm.engine.name = "vllm"
    now = {(found.name, need.condition) for found, need in unmet(config)}
    for found, need in unmet(with_vllm):
        if (found.name, need.condition) not in now:
            what = "vLLM" if found.name == "engine.name" else f"{found.name}={format_value(found.value)}"
            return f"{what} needs {need.condition}"
    return None
