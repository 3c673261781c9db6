"""Settings of the devices that each role of a run has, where Ray allots them."""

from dataclasses import dataclass

from covey.system.section import Section
from covey.system.setting import Requires, setting

ON_RAY = Requires("source = ray", ("source",), lambda source: source == "ray")


@dataclass
class DevicesConfig(Section):
    """Devices by role: GPUs, or processes where there is none."""

    trainer: int = setting(1, ge=1, needs=ON_RAY)
    """Trainer ranks; the process that was started is the first of them, and Ray starts the others."""
    gpus_per_trainer: float = setting(0.0, ge=0, needs=ON_RAY)
    """GPUs of one trainer rank; 0 trains on CPUs, or on what a single process finds."""
    sampler: int = setting(1, ge=1, needs=ON_RAY)
    """Samplers, each a process with an engine on weights of its own and an environment."""
    gpus_per_sampler: float = setting(0.0, ge=0, needs=ON_RAY)
    """GPUs of one sampler; below 1 it shares one with others, 0 samples on CPUs."""
    cpus_per_sampler: int = setting(1, ge=1, needs=ON_RAY)
    """Threads that one sampler computes with."""
    groups_per_sampler: int = setting(64, ge=1, needs=ON_RAY)
    """Most groups that one sampler has under way; fewer start later, and so on fresher weights."""
    python: str | None = setting(None, needs=ON_RAY)
    """Interpreter that samplers run on, of an environment with Ray, covey and an engine that wants packages of its own,
    such as vLLM; null takes the trainer's."""
    address: str | None = setting(None, needs=ON_RAY)
    """Address of a running Ray cluster, HOST:PORT; null joins RAY_ADDRESS, or else starts one on this machine."""
