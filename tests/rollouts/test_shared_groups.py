"""Fewer groups than processes: samples and rows of a group are shared out, and the run is that of one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config.schema import Config
from covey.config.validate import validate
from covey.engine.base import Engine
from covey.environments.base import Environment, Split
from covey.environments.episode import Answer, Episode, Observation
from covey.rollouts.rollout import pieces_of
from covey.rollouts.settings import GroupSizeStep
from covey.run.build import build_run
from covey.system import collectives
from covey.system.waits.timer import PhaseTimer
from covey.trainer.prepare import make_training_batches
from covey.types import Completion, Failure, Message, Prompt, Reward, Sampling

from ..support.processes import on_two_ranks
from ..support.small import small_config


class Compared(Environment):
    """Judges each answer by how many of its group it beats."""

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split}-{index}", "arithmetic", f"{index}:", {}) for index in range(5)]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        sums = [sum(text.encode()) for text in completions]
        return [Reward(sum(own > other for other in sums) / len(sums)) for own in sums]


class Talk(Episode):
    """Says one thing, which depends on the seed, and goes on for a second turn."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    async def reset(self) -> Observation:
        return Observation(f"{self.seed % 3} ")

    async def reply(self, answer: Answer) -> Observation:
        return Observation(" more?", done=answer.is_last, stop_reason="max_turns" if answer.is_last else None)


@dataclass
class Talks(Compared):
    """The same of episodes of two turns, that begin differently. `together` judges them where they were played."""

    together: bool = False

    def episode(self, prompt: Prompt, seed: int) -> Episode:
        return Talk(seed)

    def judges_groups(self, prompt: Prompt) -> bool:
        return self.together

    async def score_group(
        self, prompt: Prompt, episodes: Sequence[Episode], conversations: Sequence[Sequence[Message]]
    ) -> list[Reward | Failure]:
        return await self.score(prompt, [str(said[-1]["content"]) for said in conversations])


@dataclass
class Counting:
    """An engine that keeps count of what it was asked for."""

    engine: Engine
    asked: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append(n)
        return await self.engine.generate(prompt_ids, n, sampling)


def config_of(**changes: Any) -> Config:
    """Rows that read their prompt each for itself: norms of transformers round a shared one's gradient to float32."""
    usual: dict[str, Any] = {
        "groups_per_step": 1,
        "model__precision": "float64",
        "packing": "packed",
        "optimizer__name": "sgd",
        "optimizer__lr": 0.1,
        "sampling__max_tokens": 6,
    }
    config = small_config(**usual | changes)
    validate(config)
    return config


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch statistics": {"algorithm__advantage": "reinforce_plus_plus", "algorithm__kl_coef": 0.1},
    "two of three prompts": {"groups_per_step": 3, "mini_batch_groups": 1, "group_size": 3},
    "sizes that fall": {"group_size": 5, "group_size_schedule": [GroupSizeStep(step=1, group_size=2)]},
    "a filter": {"algorithm__group_filter": "zero_std", "sampling__max_tokens": 1},
    "a curriculum": {"curriculum__name": "success"},
    "tokens of the whole batch": {"algorithm__entropy_coef": 0.01, "algorithm__high_entropy_fraction": 0.4},
    "a penalty on the reward": {"algorithm__kl_coef": 0.5, "algorithm__kl_in": "reward", "updates_per_batch": 2},
}
ENVIRONMENTS: dict[str, Environment] = {
    "answers": Compared(),
    "episodes": Talks(),
    "episodes judged together": Talks(together=True),
}


def stepped(config: Config, environment: Environment, steps: int = 3) -> dict[str, Any]:
    """What so many steps come to: weights, position, and what this process did."""
    run = build_run(config, environment, PhaseTimer())
    counting = Counting(run.local.sampler.engine)
    if not isinstance(environment, Talks):
        object.__setattr__(run.local.sampler, "engine", counting)
    rows, rewards = 0, []
    for step in range(steps):
        groups = run.source.take(collectives.local_share(config.groups_per_step))
        batches, _ = make_training_batches(groups, run.trainer, run.credit, run.packing, step)
        rows += sum(part.num_rows for batch in batches for part in batch.micro_batches)
        metrics = run.trainer.step(batches, step)
        rewards += [reward for of_rank in collectives.all_gather([g.rewards for g in groups]) for reward in of_rank]
        run.source.publish(step + 1)
    weights = torch.cat([weight.detach().flatten() for _, weight in run.policy.model.named_parameters()])
    position = run.source.stream.position
    run.close()
    return {
        "weights": weights,
        "rewards": sorted(map(list, rewards)),
        "position": position,
        "loss": metrics["loss"],
        "rows": rows,
        "asked": sum(counting.asked),
    }


def all_cases(names: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [stepped(config_of(**CASES[case]), ENVIRONMENTS[kind]) for case, kind in names]


QUICK = [("plain", "answers"), ("two of three prompts", "answers")]
EVERY = [(case, kind) for case in CASES for kind in ENVIRONMENTS]


def check(names: Sequence[tuple[str, str]], folder: Path) -> list[list[dict[str, Any]]]:
    alone = all_cases(names)
    both = on_two_ranks(partial(all_cases, names), folder, seconds=300)
    for name, one, first, second in zip(names, alone, *both, strict=True):
        for rank in (first, second):
            gap = (rank["weights"] - one["weights"]).norm() / one["weights"].norm()
            assert float(gap) < 1e-9, name
            assert {key: rank[key] for key in ("rewards", "position")} == {
                key: one[key] for key in ("rewards", "position")
            }, name
            assert rank["loss"] == pytest.approx(one["loss"], rel=1e-9, abs=1e-12), name
        assert first["rows"] + second["rows"] == one["rows"], name
    return both


def test_two_processes_with_one_prompt_make_the_update_of_one_and_share_the_work(tmp_path: Path) -> None:
    first, second = check(QUICK, tmp_path)
    assert [first[0]["asked"], second[0]["asked"]] == [6, 6]
    assert first[0]["rows"] == second[0]["rows"] > 0
    assert abs(first[1]["rows"] - second[1]["rows"]) <= 9


@pytest.mark.slow
def test_group_and_batch_rules_decide_as_in_one_process(tmp_path: Path) -> None:
    check(EVERY, tmp_path)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8, 20])
def test_every_sample_of_every_group_is_drawn_by_exactly_one_process(num_ranks: int) -> None:
    shares = [pieces_of(2, 8, rank, num_ranks) for rank in range(num_ranks)]
    drawn = [(group, first + i) for share in shares for group, first, count in share for i in range(count)]
    assert drawn == [(group, number) for group in range(2) for number in range(8)]
    sizes = [sum(count for _, _, count in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
