"""Devices by role: none in two roles, and one line with the counts where more is asked for than there is."""

import os
from typing import Any

import pytest

from covey.cluster.pool import SamplerPool
from covey.cluster.roles import Allotment, role_of
from covey.cluster.settings import DevicesConfig
from covey.cluster.slot import PoolLimits
from covey.cluster.start import connect
from covey.cluster.trainers import trainer_ranks
from covey.config.validate import validate
from covey.types import RunStopped

from ..support.fake_ray import FakeRay, RayError, fake_ray
from ..support.small import small_config


@pytest.mark.parametrize(
    ("devices", "there", "line"),
    [
        (
            {"sampler": 2, "gpus_per_sampler": 2.0, "trainer": 2, "gpus_per_trainer": 1.0, "reference": 1}
            | {"gpus_per_reference": 1.0, "judge": 1, "gpus_per_judge": 0.5},
            {"CPU": 64.0, "GPU": 4.0},
            "devices.trainer=2 (2), devices.sampler=2 (4), devices.reference=1 (1) and devices.judge=1 (0.5) need 7.5 "
            "GPUs, the cluster has 4",
        ),
        (
            {"trainer": 3, "sampler": 4, "cpus_per_sampler": 2},
            {"CPU": 9.0},
            "devices.trainer=3 (2) and devices.sampler=4 (8) need 10 CPUs, the cluster has 9",
        ),
        (
            {"sampler": 0, "reference": 2, "gpus_per_reference": 1.0},
            {"CPU": 9.0},
            "devices.trainer=1 (0) and devices.reference=2 (2) need 2 GPUs, the cluster has 0",
        ),
        (
            {"sampler": 0, "gpus_per_trainer": 1.0},
            {"CPU": 9.0},
            "devices.trainer=1 (1) need 1 GPUs, the cluster has 0",
        ),
    ],
)
def test_more_than_there_is_is_one_line_with_the_counts(
    devices: dict[str, Any], there: dict[str, float], line: str
) -> None:
    with fake_ray(resources=there), pytest.raises(ValueError) as refusal:
        connect(DevicesConfig(**devices), weight_bytes=0)
    assert str(refusal.value) == line


def test_devices_that_others_hold_are_one_line_and_given_back() -> None:
    devices = DevicesConfig(sampler=2, gpus_per_sampler=1.0)
    with fake_ray(is_taken=True) as ray:
        with pytest.raises(ValueError) as refusal:
            SamplerPool(lambda: None, devices, "keep", PoolLimits(1, 1))  # type: ignore[arg-type, return-value]
        assert ray.groups == []
    assert str(refusal.value) == (
        "devices.trainer=1 (0) and devices.sampler=2 (2) need 2 GPUs, the cluster has 8 and 0 of them free after 30 s: "
        "devices.sampler=2 finds no place, since others hold them or no node has enough for one process"
    )


def test_each_process_has_a_bundle_of_its_own() -> None:
    devices = DevicesConfig(sampler=3, gpus_per_sampler=2.0, cpus_per_sampler=4)
    with fake_ray() as ray:
        place = Allotment(ray, devices, role_of(devices, "sampler"))
        assert ray.groups[0].bundles == [{"CPU": 4, "GPU": 2.0}] * 3
        chosen = [place.options(index)["scheduling_strategy"] for index in range(3)]
    assert [one.placement_group_bundle_index for one in chosen] == [0, 1, 2]
    assert all(one.placement_group is ray.groups[0] for one in chosen)


@pytest.mark.parametrize(("visible", "own"), [("", "0"), ("7, 0", "1")])
def test_the_gpu_of_the_first_trainer_is_held_on_its_node(
    visible: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    devices = DevicesConfig(trainer=2, gpus_per_trainer=1.0)
    with fake_ray() as ray:
        with trainer_ranks(devices, lambda: None):
            (group,) = ray.groups
            assert os.environ["LOCAL_RANK"] == own
            assert group.bundles == [{"GPU": 1.0, "node:127.0.0.1": 0.001}, {"CPU": 1.0, "GPU": 1.0}]
        assert ray.groups == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"devices__sampler": 0, "max_staleness": 1},
            "max_staleness=1 needs devices.sampler >= 1, got devices.sampler=0",
        ),
        (
            {"devices__sampler": 0, "publish_every": 2},
            "publish_every=2 needs devices.sampler > 0, got devices.sampler=0",
        ),
        ({"devices__sampler": 0, "engine__update": "wait"}, "engine.update=wait needs devices.sampler >= 1, got"),
        ({"devices__judge": 1}, "devices.judge=1 needs an environment with a learned judge (environment=infill"),
        ({"devices__reference": 1}, "devices.reference=1 needs an algorithm that compares with a reference"),
        (
            {"devices__reference": 1, "algorithm__kl_coef": 0.1, "algorithm__kl_estimator": "full"},
            "devices.reference=1 needs algorithm.kl_estimator other than full, got",
        ),
        (
            {"devices__trainer": 2, "timeouts__ranks": 900.0},
            "timeouts.ranks=900 needs to be > timeouts.sampling=900: the other ranks wait while the first waits for",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        validate(small_config(source="ray", **changes))
    assert str(refusal.value).startswith(line)
    assert "\n" not in str(refusal.value)


def test_a_reference_beside_ranks_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"^devices.reference=1 and devices.judge=0 need ranks that Ray starts"):
        validate(small_config(source="ray", devices__reference=1, algorithm__kl_coef=0.1))


@pytest.mark.parametrize(
    ("is_alive", "line"), [(False, "^no node of the Ray cluster is alive$"), (True, "^lost the other ranks$")]
)
def test_ranks_that_are_lost_with_the_cluster_end_in_the_line_of_the_cluster(is_alive: bool, line: str) -> None:
    def lose(ray: FakeRay) -> None:
        with trainer_ranks(DevicesConfig(trainer=2), lambda: None):
            ray.alive = is_alive
            raise RunStopped("lost the other ranks")

    with fake_ray() as ray, pytest.raises(RunStopped, match=line):
        lose(ray)


class Late(RayError, TimeoutError):
    """What Ray raises where an answer takes too long."""


@pytest.mark.parametrize(
    ("kind", "line"),
    [(RayError, "killed: out of memory"), (Late, "within 120 s; `ray status` shows what they wait for")],
)
@pytest.mark.parametrize("gpus", [0.0, 1.0])  # with GPUs, the one of this process is asked for first
def test_ranks_that_do_not_start_are_one_line(kind: type[RayError], line: str, gpus: float) -> None:
    def get(*given: Any, **keywords: Any) -> Any:
        raise kind("The actor died:\n\tactor_id: 1\nkilled: out of memory\n")

    with fake_ray() as ray:
        ray.get = get  # type: ignore[method-assign]
        ranks = trainer_ranks(DevicesConfig(trainer=2, gpus_per_trainer=gpus), lambda: None)
        with pytest.raises(RunStopped) as stopped:
            ranks.__enter__()
        assert ray.groups == []
    assert str(stopped.value) == f"1 processes of devices.trainer did not start: {line}"


def test_ray_prints_no_traceback_of_a_rank_that_fails_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_IGNORE_UNHANDLED_ERRORS", "")  # so that it is put back
    monkeypatch.delenv("RAY_IGNORE_UNHANDLED_ERRORS")
    with fake_ray(), trainer_ranks(DevicesConfig(trainer=2), lambda: None):
        assert os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] == "1"
