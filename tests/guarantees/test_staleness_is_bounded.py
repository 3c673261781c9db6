"""Promise 4: no group is trained more than `max_staleness` versions after it was started; 0 is exactly synchronous.

The bound is held where groups are about to be trained, so that it holds for every source, also a wrong one.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import Config
from covey.config.validate import validate
from covey.loop import drop_stale, run_train, train
from covey.rollouts.sampler import Sampler
from covey.rollouts.saved.journal import RolloutJournal
from covey.rollouts.source import Dropped, LocalSource, Meanwhile
from covey.rollouts.stream import PromptSampler
from covey.run import build
from covey.types import Group, Prompt, Sampling

from ..support.small import POLICIES, group, rows, scripted_for, small_config, use


def versions(folder: Path) -> list[set[int]]:
    """The policy versions of what each step trained on, step after step, from the rollouts that were written down."""
    of_step: dict[int, set[int]] = defaultdict(set)
    for row in rows(folder / "rollouts.jsonl"):
        if row["dropped"] is None:
            of_step[row["step"]].add(row["policy_version"])
    return [of_step[step] for step in sorted(of_step)]


def metric(folder: Path, name: str) -> list[float | None]:
    return [row.get(name) for row in rows(folder / "metrics.jsonl", "train")]


BOTH = pytest.mark.parametrize("kind", POLICIES)


def settings(**changes: Any) -> Config:
    """Every rollout is written down."""
    return small_config(**{"num_steps": 4, "groups_per_step": 2, "output__rollouts_per_step": 8, **changes})


# ------------------------------------------------------------------------------------- bound 0: synchronous


@BOTH
def test_every_rollout_is_of_the_version_it_trains_also_after_a_resume(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted_for(kind))
    chosen = POLICIES[kind]
    train(settings(output__save_every=2, evaluation__every=2, **chosen), tmp_path)
    changes = {"num_steps": 9, "updates_per_batch": 2, "evaluation__every": 2, "output__save_every": 2}
    named = ["num_steps", "updates_per_batch"]
    train(settings(resume=str(tmp_path), resume_changes=named, **changes, **chosen), tmp_path)
    assert versions(tmp_path) == [{step} for step in range(9)]
    assert metric(tmp_path, "staleness_max") == [0.0] * 9
    assert metric(tmp_path, "dropped/stale_groups") == [0.0] * 9


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("change", [{"engine__max_rows": 3}, {"algorithm__group_filter": "zero_std"}], ids=",".join)
def test_waves_and_groups_drawn_again_are_of_the_same_version(
    change: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted_for(kind))
    train(settings(**change, **POLICIES[kind]), tmp_path)
    assert versions(tmp_path) == [{step} for step in range(4)]


def test_a_larger_bound_is_refused_where_the_source_is_synchronous() -> None:
    with pytest.raises(ValueError, match=r"^max_staleness=2 needs source=ray, got source=local "):
        validate(small_config(max_staleness=2))


# ------------------------------------------------------------------------------------- a source that is late


@dataclass
class Late:
    """Hands over groups that were started `delay` takes before, the first ones of `fresh_groups` in time."""

    inner: LocalSource
    delay: int
    fresh_groups: int = 0
    waiting: list[list[Group]] = field(default_factory=list)

    @property
    def sampler(self) -> Sampler:
        return self.inner.sampler

    @property
    def sampling(self) -> Sampling:
        return self.inner.sampling

    @property
    def stream(self) -> PromptSampler:
        return self.inner.stream

    @property
    def dropped(self) -> Sequence[Dropped]:
        return self.inner.dropped

    def take(self, n: int, meanwhile: Meanwhile | None = None) -> list[Group]:
        fresh = self.inner.take(self.fresh_groups) if self.fresh_groups else []
        while len(self.waiting) <= self.delay:
            self.waiting.append(self.inner.take(n - self.fresh_groups))
        return fresh + self.waiting.pop(0)

    def run(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
        return self.inner.run(prompts, group_size, sampling)

    def publish(self, version: int) -> None:
        self.inner.publish(version)

    def follow(self, step: int, num_steps: int) -> None:
        self.inner.follow(step, num_steps)

    def take_scoring_seconds(self) -> float:
        return self.inner.take_scoring_seconds()

    def report_to(self, file: Path) -> None:
        return

    def keep_in(self, journal: RolloutJournal) -> None:
        return

    def take_schedule(self) -> Mapping[str, Any]:
        return {}

    def environment_metrics(self) -> Sequence[Mapping[str, float]]:
        return self.inner.environment_metrics()

    def take_drops(self) -> dict[str, int]:
        return self.inner.take_drops()

    def take_metrics(self) -> dict[str, float]:
        return self.inner.take_metrics()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def close(self) -> None:
        self.inner.close()


def late_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    late: Callable[[LocalSource], Late],
    bound: int,
    kind: str = "causal",
    **more: Any,
) -> list[dict[str, Any]]:
    """The training rows of a run whose groups come late."""
    use(monkeypatch, scripted_for(kind))
    honest = build.build_source
    monkeypatch.setattr(build, "build_source", lambda *parts: late(honest(*parts)))
    chosen = {"num_steps": 5, "optimizer__lr": 5e-2, "preflight__enabled": False, **POLICIES[kind], **more}
    run_train(settings(max_staleness=bound, **chosen), folder)  # whose rules know no source that is late
    return rows(folder / "metrics.jsonl", "train")


def test_a_teacher_judges_late_groups_against_the_weights_they_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for base in ("current", "behaviour"):
        with monkeypatch.context() as patched:
            taught = {"algorithm__teacher": "self", "algorithm__teacher_options": {"base": base}}
            late = partial(Late, delay=1)
            (tmp_path / base).mkdir()
            found[base] = late_run(tmp_path / base, patched, late, 1, **taught, algorithm__loss="reinforce")
    assert [row["staleness_max"] for row in found["current"]] == [0.0, 1.0, 1.0, 1.0, 1.0]
    # Both policies begin as the teacher; after an update the trained one has left it, not yet the one that sampled
    assert abs(found["current"][0]["teacher/kl"]) < 1e-6
    assert abs(found["behaviour"][1]["teacher/kl"]) < 1e-6
    assert abs(found["current"][1]["teacher/kl"]) > 1e-4


@pytest.mark.parametrize(
    ("delay", "bound", "kind"),
    [(1, 0, "causal"), (3, 0, "causal"), (2, 1, "causal"), (3, 2, "causal"), (1, 0, "masked"), (2, 1, "masked")],
)
def test_groups_older_than_the_bound_are_dropped_with_the_reason_and_counted(
    delay: int, bound: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = late_run(tmp_path, monkeypatch, partial(Late, delay=delay), bound, kind)
    late = 5 - bound - 1  # the first steps of a run cannot be late yet
    assert [row["dropped/stale_groups"] for row in found] == [0.0] * (bound + 1) + [2.0] * late
    assert [row["num_rollouts_trained"] > 0 for row in found] == [True] * (bound + 1) + [False] * late
    assert versions(tmp_path) == [{0}] * (bound + 1)
    assert json.loads((tmp_path / "summary.json").read_text())["dropped_groups"] == 2 * late


@pytest.mark.parametrize(("delay", "kind"), [(1, "causal"), (2, "causal"), (1, "masked")])
def test_groups_within_the_bound_are_trained_and_their_age_is_logged(
    delay: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = late_run(tmp_path, monkeypatch, partial(Late, delay=delay), delay, kind)
    ages = [float(min(step, delay)) for step in range(5)]
    assert [row["staleness_max"] for row in found] == ages
    assert [row["dropped/stale_groups"] for row in found] == [0.0] * 5
    assert [row["mismatch_max"] > 1e-3 for row in found] == [age > 0 for age in ages]


@pytest.mark.long
def test_a_group_in_time_is_trained_beside_one_that_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = late_run(tmp_path, monkeypatch, partial(Late, delay=1, fresh_groups=1), bound=0)
    assert versions(tmp_path) == [{step} for step in range(5)]
    assert [row["num_groups"] for row in found] == [2.0, 1.0, 1.0, 1.0, 1.0]
    assert [row["staleness_max"] for row in found] == [0.0] * 5


def test_the_oldest_rollout_is_the_age_of_its_group() -> None:
    def aged(*policy_versions: int) -> Group:
        plain = group(*(0.0 for _ in policy_versions))
        pairs = zip(plain.rollouts, policy_versions, strict=True)
        return replace(plain, rollouts=tuple(replace(r, policy_version=version) for r, version in pairs))

    given = [aged(7, 7), aged(7, 5), aged(6, 7), aged(4, 4), aged()]
    assert drop_stale(given, step=7, max_staleness=0) == [aged(7, 7), aged()]
    assert drop_stale(given, step=7, max_staleness=1) == [aged(7, 7), aged(6, 7), aged()]
    assert drop_stale(given, step=7, max_staleness=2) == [aged(7, 7), aged(7, 5), aged(6, 7), aged()]
    assert drop_stale(given, step=7, max_staleness=3) == given
