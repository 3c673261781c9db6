"""Devices by role, and the placement groups that hold them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.cluster.settings import DevicesConfig

PLACE_SECONDS = 30.0
"""Seconds for the cluster's devices to fall free: those of a run that just ended take a moment."""
NODE_SHARE = 0.001
"""Amount of the resource that stands for a node: it holds a bundle there."""


@dataclass(frozen=True, slots=True)
class Role:
    """The processes of one role and their devices."""

    name: str
    """Name as in `devices.NAME`."""
    count: int
    cpus: int
    gpus: float
    strategy: str = "PACK"
    """Placement strategy of Ray: PACK keeps processes together, SPREAD apart."""

    @property
    def asked(self) -> dict[str, float]:
        return {"CPU": float(self.count * self.cpus), "GPU": self.count * self.gpus}


def roles_of(devices: DevicesConfig) -> list[Role]:
    """Return all roles; the first trainer rank takes no CPU of Ray's."""
    return [
        Role("trainer", devices.trainer, 1, devices.gpus_per_trainer),
        Role("sampler", devices.sampler, devices.cpus_per_sampler, devices.gpus_per_sampler, "SPREAD"),
        Role("reference", devices.reference, 1, devices.gpus_per_reference),
        Role("judge", devices.judge, 1, devices.gpus_per_judge),
    ]


def role_of(devices: DevicesConfig, name: str) -> Role:
    return next(role for role in roles_of(devices) if role.name == name)


def asked_of(devices: DevicesConfig) -> dict[str, float]:
    """Return the CPUs and GPUs that all processes take together."""
    roles = roles_of(devices)
    return {"CPU": sum(role.asked["CPU"] for role in roles) - 1, "GPU": sum(role.asked["GPU"] for role in roles)}


def check_counts(ray: Any, devices: DevicesConfig) -> None:
    """Refuse roles without enough devices in the cluster, with the counts. ValueError."""
    there = ray.cluster_resources()
    for kind, count in asked_of(devices).items():
        if count > there.get(kind, 0.0):
            raise ValueError(f"{_need(devices, kind)}, the cluster has {there.get(kind, 0.0):g}")


def _need(devices: DevicesConfig, kind: str) -> str:
    """Describe each role's need: "devices.trainer=1 (1) and devices.sampler=2 (4) need 5 GPUs"."""
    asked = {role: role.asked[kind] - (role.name == "trainer" and kind == "CPU") for role in roles_of(devices)}
    first, *others = [f"devices.{role.name}={role.count} ({number:g})" for role, number in asked.items() if role.count]
    *others, last = others or [""]
    names = ", ".join([first, *others]) + (f" and {last}" if last else "")
    return f"{names} need {asked_of(devices)[kind]:g} {kind}s"


class Allotment:
    """The devices of one role, held by a placement group until `close`."""

    def __init__(self, ray: Any, devices: DevicesConfig, role: Role, bundles: Sequence[dict[str, float]] = ()) -> None:
        """Wait for the devices; `bundles` are each process's, by default the role's.

        Raises ValueError, with the counts, where they do not become free.
        """
        self._ray, self._role = ray, role
        bundles = bundles or [{"CPU": role.cpus} | ({"GPU": role.gpus} if role.gpus > 0 else {})] * role.count
        # The devices of all processes together, or none
        self._group = ray.util.placement_group(list(bundles), strategy=role.strategy)
        if not self._group.wait(PLACE_SECONDS):
            self.close()
            kind = "GPU" if role.gpus > 0 else "CPU"
            there, free = ray.cluster_resources().get(kind, 0.0), ray.available_resources().get(kind, 0.0)
            raise ValueError(
                f"{_need(devices, kind)}, the cluster has {there:g} and {free:g} of them free after "
                f"{PLACE_SECONDS:g} s: devices.{role.name}={role.count} finds no place, since others hold them or no "
                "node has enough for one process"
            )

    def options(self, index: int) -> dict[str, Any]:
        """Return the options of the actor in place `index`."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return {
            "num_cpus": self._role.cpus,
            "num_gpus": self._role.gpus,
            "scheduling_strategy": strategy(placement_group=self._group, placement_group_bundle_index=index),
        }

    def close(self) -> None:
        self._ray.util.remove_placement_group(self._group)
