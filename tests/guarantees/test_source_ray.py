"""Promises hold wherever groups are sampled: samplers of their own with max_staleness=0 give the run in process.

Everything that decides what is sampled, kept, trained and logged is tried, over a Ray of one process, in float64.
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from covey.config.auto_adjust import add_correction
from covey.environments.base import Environment, JudgeSummary
from covey.environments.episode import Answer, Episode, Observation
from covey.environments.settings import CustomConfig, MixtureConfig
from covey.loop import train
from covey.rollouts.settings import GroupSizeStep
from covey.run.records.record import RunRecorder
from covey.types import Failure, Message, Prompt, Reward
from covey_report.runs.replay import replay

from ..support.fake_ray import fake_ray
from ..support.scripted import Scripted
from ..support.small import POLICIES, equal, rows, saved_policy, scripted, scripted_for, small_config, use

OF_THE_CLOCK = ("time", "seconds", "tokens_per_second", "trainer_waited_seconds")
OF_RAY = ("staleness/", "buffer/", "samplers/", "environment/")
"""What environments log is of the time: the next step's groups are scored while held-out prompts are answered."""


@dataclass(frozen=True)
class Annealed(Scripted):
    """Rewards fall as training goes on, and the environment logs how often it scored, and what."""

    progress: list[float] = field(default_factory=lambda: [0.0])
    logged: list[float] = field(default_factory=list)

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        self.progress[0] = step / max_steps + epoch / 100

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        rewards = [self.verdict(prompt, text) * (2 - self.progress[0]) for text in completions]
        self.logged.extend(rewards)
        return [Reward(value, {"value": value, "progress": self.progress[0]}) for value in rewards]

    def metrics(self) -> dict[str, float]:
        found = {"scored": float(len(self.logged)), "mean": sum(self.logged) / max(1, len(self.logged))}
        self.logged.clear()
        return found


@dataclass(frozen=True)
class Talking(Scripted):
    """Answers each first turn."""

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        return {"role": "user", "content": "no"} if len(messages) < 3 else None


@dataclass(frozen=True)
class Graded(Scripted):
    """Of three levels."""

    def difficulty(self, prompt: Prompt) -> float:
        return float(prompt.id[-1]) // 2


class Delayed(Episode):
    """Answers after a while that follows from what was said, and pays each turn."""

    async def reply(self, answer: Answer) -> Observation:
        paid = sum(answer.text.encode()) % 5
        for _ in range(paid):
            await asyncio.sleep(0)
        return Observation(f"{paid}", reward=paid / 8, state=f"{paid}", is_void=paid == 4)


@dataclass(frozen=True)
class Episodic(Scripted):
    """Has three turns of its own."""

    def episode(self, prompt: Prompt, seed: int) -> Episode:
        return Delayed()

    def max_turns(self, prompt: Prompt) -> int:
        return 3


def episodic() -> Scripted:
    plain = scripted()
    return Episodic(plain.texts, plain.verdict)


def graded() -> Scripted:
    plain = scripted()
    return Graded(plain.texts, plain.verdict)


@dataclass(frozen=True)
class JudgedAnnealed(Annealed):
    """Of a learned judge."""

    def judge_summary(self) -> JudgeSummary:
        return JudgeSummary(True, "a judge")


def judged_annealed() -> Scripted:
    plain = scripted()
    return JudgedAnnealed(plain.texts, plain.verdict)


MIXTURE = MixtureConfig(
    parts={name: CustomConfig(factory="tests:anything") for name in ("often", "seldom")}, weights={"often": 3.0}
)


def annealed() -> Scripted:
    plain = scripted()
    return Annealed(plain.texts, plain.verdict)


def talking() -> Scripted:
    plain = scripted()
    return Talking(plain.texts, plain.verdict)


def some_alike(prompt: Prompt, text: str) -> float:
    """Half of the prompts reward all completions alike."""
    return 1.0 if prompt.id[-1] in "024" else sum(text.encode()) % 5 / 4


FEATURES: dict[str, tuple[Callable[[], Environment], dict[str, Any]]] = {
    "plain": (scripted, {}),
    "filter": (
        lambda: scripted(some_alike),
        {"algorithm__group_filter": "zero_std", "algorithm__group_filter_rounds": 2},
    ),
    "sizes": (scripted, {"group_size_schedule": [GroupSizeStep(2, 3), GroupSizeStep(3, 5)]}),
    "success": (scripted, {"curriculum__name": "success", "evaluation__correct_above": 0.5}),
    "lora": (scripted, {"model__lora_rank": 4}),
    "reference": (scripted, {"algorithm__kl_coef": 0.1, "updates_per_batch": 2}),
    "masked": (lambda: scripted_for("masked"), POLICIES["masked"] | {"sampling__num_passes": 2}),
    "annealed": (annealed, {}),
    "mixture": (scripted, {"environment": MIXTURE, "curriculum__name": "success", "evaluation__correct_above": 0.5}),
    "difficulty": (
        graded,
        {"curriculum__name": "difficulty", "curriculum__promote_at": 0.2, "curriculum__promotion_groups": 2},
    ),
    "episodes": (
        episodic,
        {
            "algorithm__turn_credit": "discounted",
            "algorithm__drop_void_turns": True,
            "sampling__stop": list("abcdefghijklmnopqrstuvwxyz0123456789"),
        },
    ),
    "turns": (talking, {"sampling__max_tokens": 24, "sampling__stop": list("abcdefghijklmnop")}),
}


def settings(**changes: Any) -> dict[str, Any]:
    usual = {"num_steps": 4, "groups_per_step": 3, "model__precision": "float64", "preflight__enabled": False}
    return usual | {"evaluation__every": 2, "output__rollouts_per_step": 40, "sampling__max_tokens": 8} | changes


def of_ray(**changes: Any) -> dict[str, Any]:
    return settings(**{"source": "ray", "devices__sampler": 2} | changes)


def logged(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = rows(folder / name)
    return [{k: v for k, v in row.items() if k not in OF_THE_CLOCK and not k.startswith(OF_RAY)} for row in found]


def apart(first: Any, second: Any, where: str = "") -> list[str]:
    """Names of what two rows do not have alike."""
    if isinstance(first, dict) and isinstance(second, dict):
        names = dict.fromkeys([*first, *second])
        return [found for n in names for found in apart(first.get(n, "lacks"), second.get(n, "lacks"), f"{where}.{n}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = zip(first, second, strict=True)
        return [found for place, (a, b) in enumerate(pairs) for found in apart(a, b, f"{where}[{place}]")]
    if isinstance(first, float) and isinstance(second, float):
        return [] if first == pytest.approx(second, rel=1e-9, abs=1e-9) else [f"{where}: {first}, {second}"]
    return [] if first == second else [f"{where}: {first!r}, {second!r}"]


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
def test_samplers_without_staleness_give_the_run_in_process(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, changes = FEATURES[feature]
    use(monkeypatch, make())
    train(small_config(**settings(**changes)), tmp_path / "local")
    with fake_ray():
        train(small_config(**of_ray(**changes)), tmp_path / "ray")
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"):
        assert apart(logged(tmp_path / "local", name), logged(tmp_path / "ray", name)) == [], name


@pytest.mark.long
def test_samplers_with_drafts_write_the_rollouts_of_a_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    compiled = {"model__nano_num_heads": 1, "model__precision": "float32", "sampling__max_tokens": 24}
    changes = compiled | {"sampling__temperature": 0.1}
    train(small_config(**settings(engine__speculation="off", **changes)), tmp_path / "plain")
    with fake_ray():
        train(small_config(**of_ray(engine__speculation="on", **changes)), tmp_path / "drafted")
    plain, drafted = (logged(tmp_path / name, "rollouts.jsonl") for name in ("plain", "drafted"))
    assert plain == drafted
    assert sum(row.get("engine/draft_tokens", 0.0) for row in rows(tmp_path / "drafted" / "metrics.jsonl")) > 0


@pytest.mark.long
def test_what_samplers_environments_log_adds_up_as_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, annealed())
    train(small_config(**settings()), tmp_path / "local")
    use(monkeypatch, annealed())
    with fake_ray():
        train(small_config(**of_ray(devices__sampler=1)), tmp_path / "ray")
    runs = (rows(tmp_path / name / "metrics.jsonl") for name in ("local", "ray"))
    local, ray = (sum(row["environment/scored"] for row in run) for run in runs)
    assert local == 4 * 3 * 4 + 3 * 2 * 3, "completions of steps and of evaluations"
    assert local <= ray <= local + 3 * 4, "the groups of a step more may be under way"


# ------------------------------------------------------------------------------------- devices by role

PENALISED = {"algorithm__kl_coef": 0.1, "sampling__top_k": 20, "environment": CustomConfig(factory="tests:anything")}
ROLES: dict[str, dict[str, Any]] = {
    "trainer alone": {"devices__sampler": 0},
    "reference": {"devices__reference": 2},
    "reference, trainer samples": {"devices__reference": 1, "devices__sampler": 0},
    "penalty on the reward": {"devices__reference": 1, "algorithm__kl_in": "reward"},
    "several updates": {"devices__reference": 1, "updates_per_batch": 2},
    "lora": {"devices__reference": 1, "model__lora_rank": 4},
    "judge": {"devices__judge": 2},
    "judge, trainer samples": {"devices__judge": 1, "devices__sampler": 0},
    "all": {"devices__reference": 1, "devices__judge": 1},
}


@dataclass(frozen=True)
class Judged(Talking):
    """Of a learned judge, which also talks."""

    def judge_summary(self) -> JudgeSummary:
        return JudgeSummary(True, "a judge")


@dataclass(frozen=True)
class JudgedEpisodes(Episodic):
    """Of a learned judge, with episodes of its own."""

    def judge_summary(self) -> JudgeSummary:
        return JudgeSummary(True, "a judge")


def judged() -> Scripted:
    plain = scripted()
    return Judged(plain.texts, plain.verdict)


@pytest.mark.long
@pytest.mark.parametrize("role", ROLES)
def test_a_role_on_devices_of_its_own_gives_the_same_run(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, judged())
    of_roles = {name: value for name, value in ROLES[role].items() if name.startswith("devices__")}
    changes = PENALISED | {name: value for name, value in ROLES[role].items() if name not in of_roles}
    train(small_config(**settings(**changes)), tmp_path / "local")
    with fake_ray() as ray:
        train(small_config(**of_ray(**changes | of_roles)), tmp_path / "ray")
        kinds = Counter(type(actor.target).__name__ for actor in ray.actors)
        assert ray.groups == [], "devices are given back"
    wanted = {"SamplerActor": of_roles.get("devices__sampler", 2), "ReferenceActor": of_roles.get("devices__reference")}
    assert kinds == {n: m for n, m in {**wanted, "JudgeActor": of_roles.get("devices__judge")}.items() if m}
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"):
        assert apart(logged(tmp_path / "local", name), logged(tmp_path / "ray", name)) == [], name


@pytest.mark.long
def test_what_a_judge_logs_and_is_told_is_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    custom = {"environment": CustomConfig(factory="tests:anything")}
    runs = {"local": settings(**custom), "ray": of_ray(devices__judge=1, devices__sampler=0, **custom)}
    for name, chosen in runs.items():
        use(monkeypatch, judged_annealed())
        with fake_ray():
            train(small_config(**chosen), tmp_path / name)
    found = [rows(tmp_path / name / "metrics.jsonl") for name in runs]
    of_environment = [[{k: v for k, v in r.items() if k.startswith("environment/")} for r in run] for run in found]
    assert of_environment[0] == of_environment[1]
    assert any(of_environment[0])


@dataclass(frozen=True)
class Measured(Judged):
    """Answers some prompts alone, by the policy's tokenizer."""

    read: list[str] = field(default_factory=list)

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        return {"role": "user", "content": self.read[0]}

    def max_turns(self, prompt: Prompt) -> int:
        return 1 if prompt.id[-1] in "024" else 2

    def read_with(self, tokenizer: Any) -> None:
        self.read[:] = [tokenizer.decode([8])]


@pytest.mark.long
def test_a_judge_elsewhere_knows_the_turns_and_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    custom = {"environment": CustomConfig(factory="tests:anything")}
    runs = {"local": settings(**custom), "ray": of_ray(devices__judge=1, **custom)}
    plain = scripted()
    for name, chosen in runs.items():
        monkeypatch.setattr(CustomConfig, "build", lambda *_: Measured(plain.texts, plain.verdict))
        with fake_ray():
            train(small_config(**chosen), tmp_path / name)
    found = [logged(tmp_path / name, "rollouts.jsonl") for name in runs]
    assert apart(*found) == []
    assert {len(row["turns"]) for row in found[0]} == {1, 2}


def test_episodes_are_refused_where_others_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be left out without a word."""
    plain = scripted()
    use(monkeypatch, JudgedEpisodes(plain.texts, plain.verdict))
    chosen = of_ray(devices__judge=1, environment=CustomConfig(factory="tests:anything"))
    line = r"^devices.judge=1 judges answers, and environment=scripted has episodes, which are played and judged where "
    with fake_ray(), pytest.raises(ValueError, match=line):
        train(small_config(**chosen), tmp_path / "run")


# ------------------------------------------------------------------------------------- resumed, and stale


@pytest.mark.long
@pytest.mark.parametrize("feature", ["success", "masked", "episodes", pytest.param("turns", marks=pytest.mark.slow)])
def test_a_run_that_was_cut_off_ends_with_the_same_weights(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, changes = FEATURES[feature]
    use(monkeypatch, make())
    chosen = of_ray(output__save_every=2, **changes)
    with fake_ray():
        train(small_config(**chosen), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000004")
    with fake_ray():
        train(small_config(**chosen, resume="run"), tmp_path / "cut")
    assert equal(saved_policy(tmp_path / "cut"), saved_policy(tmp_path / "whole"))
    assert apart(logged(tmp_path / "whole"), logged(tmp_path / "cut")) == []


@dataclass(frozen=True)
class Told(Scripted):
    """Keeps what it is told of how far training is."""

    heard: list[tuple[int, int, float]] = field(default_factory=list)

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        self.heard.append((step, max_steps, epoch))


@pytest.mark.parametrize("bound", [0, 2])
def test_a_resumed_run_gives_rewards_the_same_step_and_epoch(
    bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 6 prompts 3 are trained in a step, and more are drawn already."""
    plain, heard = scripted(), {"whole": list[Any](), "cut": list[Any]()}
    chosen = of_ray(num_steps=3, max_staleness=bound, devices__sampler=1, evaluation__every=0, output__save_every=2)
    use(monkeypatch, Told(plain.texts, plain.verdict, heard=heard["whole"]))
    with fake_ray():
        train(small_config(**chosen), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    use(monkeypatch, Told(plain.texts, plain.verdict, heard=heard["cut"]))
    with fake_ray():
        train(small_config(**chosen, resume="run"), tmp_path / "run")
    # A sampler that starts while training does may be told twice
    told = {name: [moment for moment, _ in groupby(moments)] for name, moments in heard.items()}
    assert told == {"whole": [(step, 3, step / 2) for step in range(4)], "cut": [(2, 3, 1.0), (3, 3, 1.5)]}


STALE = [
    *("filter", "difficulty", "mixture", "lora", "turns", "episodes"),
    *(pytest.param(feature, marks=pytest.mark.slow) for feature in ("sizes", "success", "reference")),
]
"""What one process can sample again by the schedule: the native engine, rewards of the completions alone."""


@pytest.mark.parametrize("feature", STALE)
def test_a_stale_run_holds_its_bound_and_replays_to_the_same_weights(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, changes = FEATURES[feature]
    use(monkeypatch, make())
    monkeypatch.setattr("covey.engine.native.engine.TURN_SECONDS", 0.0)  # weights change within completions
    config, _ = add_correction(small_config(**of_ray(max_staleness=2, **changes)))
    with fake_ray():
        train(config, tmp_path / "run")
    found = rows(tmp_path / "run" / "metrics.jsonl", "train")
    ages = [row["staleness/max"] for row in found]
    assert 0 < max(ages) <= 2
    # Of completions over several versions the first token counts, as it does where groups are dropped for their age
    trained = [row["staleness_max"] for row in found]
    if "filter" in feature:  # the oldest group may have been filtered out
        assert all(own <= age for own, age in zip(trained, ages, strict=True))
    else:
        assert trained == ages
    assert max(row["staleness/mean"] for row in found) == 2
    (tmp_path / "again").mkdir()
    with RunRecorder(config, tmp_path / "again") as record:
        digest = replay(config, tmp_path / "run", record, lambda text: None)
    assert digest == rows(tmp_path / "run" / "schedule.jsonl")[-1]["weights"]


def test_groups_that_are_drawn_ahead_have_the_size_of_the_step_that_trains_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    with fake_ray():
        train(small_config(**of_ray(max_staleness=2, **FEATURES["sizes"][1])), tmp_path)
    sizes = [[group["size"] for group in row["groups"]] for row in rows(tmp_path / "schedule.jsonl") if "groups" in row]
    assert sizes == [[4] * 3, [4] * 3, [3] * 3, [5] * 3]


@pytest.mark.long
def test_a_reward_that_follows_the_run_is_not_replayed_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, annealed())
    config, _ = add_correction(small_config(**of_ray(max_staleness=1)))
    with fake_ray():
        train(config, tmp_path / "run")
    use(monkeypatch, annealed())
    (tmp_path / "again").mkdir()
    differs = pytest.raises(ValueError, match=r"step \d ends with other weights than the run had")
    with RunRecorder(config, tmp_path / "again") as record, differs:
        replay(config, tmp_path / "run", record, lambda text: None)
