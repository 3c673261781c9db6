"""Roles on devices of their own on a real Ray: the same numbers, and a process that is killed is started again."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from covey.cluster.roles import Allotment, roles_of
from covey.cluster.settings import DevicesConfig
from covey.cluster.start import kept_handlers

from ...guarantees.runs import finish_well, kill, new_run, num_trained, prepare, wait_until
from ...support.processes import are_gone
from .test_runs_on_ray import ROUNDING, SIZES, WITHOUT_END, actors, stop, train_rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SUMS = (
    *(*SIZES, "recipe=arithmetic", "cold_start.num_steps=40", "model.precision=float64", "num_steps=20"),
    "algorithm.kl_coef=0.05",
)
FILLS = (
    *(*SIZES, "recipe=infill_nano", "cold_start.num_steps=20", "cold_start.target_accuracy=null", "num_steps=8"),
    *("model.precision=float64", "environment.judge_num_steps=60", "environment.judge_floor=0.1"),
    "environment.monitors=[]",
)
RUNS = {
    "reference": (SUMS, ("devices.sampler=1", "devices.reference=2")),
    "no-sampler": (SUMS, ("devices.sampler=0", "devices.trainer=2", "devices.reference=1")),
    "sharded": (
        SUMS,
        ("devices.sampler=1", "devices.trainer=2", "parallel.strategy=fsdp", "devices.reference=1"),
    ),
    "judge": (FILLS, ("devices.sampler=1", "devices.judge=1")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    prepare(folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_role_on_devices_of_its_own_gives_the_same_metrics(name: str, folder: Path) -> None:
    settings, words = RUNS[name]
    local = "fills" if settings is FILLS else "sums"
    if not (folder / local).exists():
        finish_well(new_run(folder, local, settings=settings))
    finish_well(new_run(folder, name, "source=ray", *words, settings=settings))
    own, other = train_rows(folder / local), train_rows(folder / name)
    assert len(own) == len(other) > 0
    # Sums over ranks are rounded otherwise than those of one process.
    most = 1e-8 if "devices.trainer=2" in words else ROUNDING
    of_work = {"time", "seconds", "tokens_per_second", "num_micro_batches", "padding_fraction"}
    for row, found in zip(own, other, strict=True):
        for key in row.keys() - of_work:
            assert found[key] == row[key] or abs(found[key] - row[key]) < most, key


def test_a_reference_that_is_killed_is_started_again_and_nothing_differs(folder: Path) -> None:
    if not (folder / "sums").exists():
        finish_well(new_run(folder, "sums", settings=SUMS))
    words = ("source=ray", "devices.sampler=0", "devices.reference=1", WITHOUT_END)
    process = new_run(folder, "killed", *words, settings=SUMS)
    assert wait_until(lambda: num_trained(folder / "killed") >= 3, process)
    (victim,) = actors(process, "ReferenceActor")
    os.kill(victim, signal.SIGKILL)
    last = stop(folder / "killed", process)
    own, other = ([row["kl_sequence_mean"] for row in train_rows(folder / name)] for name in ("sums", "killed"))
    assert own[:last] == other[:20]


def test_roles_of_a_driver_that_is_killed_are_gone(folder: Path) -> None:
    process = new_run(folder, "gone", "source=ray", "devices.sampler=0", "devices.judge=1", WITHOUT_END, settings=FILLS)
    assert wait_until(lambda: num_trained(folder / "gone") >= 2, process)
    family = actors(process, "JudgeActor")
    assert family
    kill(process)
    assert are_gone(family, seconds=15)


# ------------------------------------------------------------------------------------------------ pretended devices


def class_by_value() -> type:
    """Return a class that travels by value, so that its processes import nothing heavy."""

    class Holder:
        def devices(self) -> list[tuple[str, int]]:
            import ray

            return [(ray.util.get_node_ip_address(), int(number)) for number in ray.get_gpu_ids()]

    return Holder


@pytest.fixture(scope="module")
def pretended() -> Any:
    """Two nodes of four GPUs that nobody has."""
    node = {"num_cpus": 16, "num_gpus": 4, "object_store_memory": 100_000_000}
    with kept_handlers():
        head = node | {"node_ip_address": "127.0.0.2", "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(node_ip_address="127.0.0.3", **node)
        ray.init(address=cluster.address, _node_ip_address="127.0.0.2", namespace="covey", log_to_driver=False)
        yield ray
        ray.shutdown()
        cluster.shutdown()


LAYOUTS = [
    {"trainer": 2, "gpus_per_trainer": 1.0, "sampler": 2, "gpus_per_sampler": 2.0}
    | {"reference": 1, "gpus_per_reference": 1.0, "judge": 1, "gpus_per_judge": 1.0},
    {"trainer": 1, "gpus_per_trainer": 4.0, "sampler": 1, "gpus_per_sampler": 4.0},
]


@pytest.mark.xdist_group("nodes")  # of the same addresses as those of SLURM
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_device_is_in_two_roles(layout: dict[str, Any], pretended: Any) -> None:
    devices = DevicesConfig(**layout)
    held: list[tuple[str, int]] = []
    places, holders = [], []
    try:
        for role in (role for role in roles_of(devices) if role.count > 0 and role.gpus > 0):
            places.append(Allotment(ray, devices, role))
            holders += [
                ray.remote(class_by_value()).options(**places[-1].options(index)).remote()
                for index in range(role.count)
            ]
        held = [device for found in ray.get([h.devices.remote() for h in holders], timeout=60) for device in found]
        assert len(held) == len(set(held)) == sum(role.asked["GPU"] for role in roles_of(devices))
    finally:
        for holder in holders:
            with suppress(Exception):
                ray.kill(holder)
        for place in places:
            place.close()
