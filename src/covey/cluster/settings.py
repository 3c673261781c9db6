"""Settings of each role's devices, allotted by Ray."""

from dataclasses import dataclass

from covey.algorithm.settings import FROZEN
from covey.system.section import Section
from covey.system.setting import Requires, is_positive, setting

ON_RAY = Requires("source = ray", ("source",), lambda source: source == "ray")
APART = Requires("devices.sampler > 0", ("devices.sampler",), is_positive)
"""Condition of settings about samplers in processes of their own."""
SAMPLED_APART = (ON_RAY, APART)
BY_TOKEN = Requires(
    "algorithm.kl_estimator other than full", ("algorithm.kl_estimator",), lambda estimator: estimator != "full"
)
"""The exact KL needs the reference's logits of the whole vocabulary, which do not travel."""


@dataclass
class DevicesConfig(Section):
    """Devices by role: GPUs, or processes on CPUs."""

    trainer: int = setting(1, ge=1, needs=ON_RAY)
    """Trainer ranks; the process that was started is the first of them, and Ray starts the others."""
    gpus_per_trainer: float = setting(0.0, ge=0, needs=ON_RAY)
    """GPUs of one trainer rank; 0 trains on CPUs, or on devices of a single process, shared with samplers or not."""
    sampler: int = setting(1, ge=0, needs=ON_RAY)
    """Samplers, each a process with an engine on weights of its own and an environment; 0: the trainer's processes
    sample, between updates, as they do by default where max_staleness=0 lets no sampler run meanwhile."""
    gpus_per_sampler: float = setting(0.0, ge=0, needs=SAMPLED_APART)
    """GPUs of one sampler; below 1 it shares one with others, 0 samples on CPUs."""
    cpus_per_sampler: int = setting(1, ge=1, needs=SAMPLED_APART)
    """Threads that one sampler computes with."""
    groups_per_sampler: int = setting(64, ge=1, needs=SAMPLED_APART)
    """Most unfinished groups of one sampler; fewer start later, and so on fresher weights."""
    reference: int = setting(0, ge=0, needs=(ON_RAY, FROZEN, BY_TOKEN))
    """Processes with the reference policy, for its log-probs while the trainer works; 0: the trainer's."""
    gpus_per_reference: float = setting(
        0.0, ge=0, needs=Requires("devices.reference > 0", ("devices.reference",), is_positive)
    )
    """GPUs of one of them; 0 computes on CPUs."""
    judge: int = setting(0, ge=0, needs=ON_RAY)
    """Processes in which an environment with a learned judge scores; 0: where groups are sampled."""
    gpus_per_judge: float = setting(0.0, ge=0, needs=Requires("devices.judge > 0", ("devices.judge",), is_positive))
    """GPUs of one of them; 0 judges on CPUs."""
    python: str | None = setting(None, needs=SAMPLED_APART)
    """Interpreter that samplers run on, of an environment with Ray, covey and an engine that wants packages of its own,
    such as vLLM; null takes the trainer's."""
    address: str | None = setting(None, needs=ON_RAY)
    """Address of a running Ray cluster, HOST:PORT; null joins RAY_ADDRESS, or else starts one on this machine."""
