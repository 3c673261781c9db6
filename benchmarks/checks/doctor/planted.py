"""Runs that are made sick on purpose: the recipe `arithmetic`, shortened, with one thing wrong each.

python -m benchmarks.checks.doctor.planted NAME hydra.run.dir=FOLDER     # trains one of them
python -m benchmarks.checks.doctor.planted control RECIPE WORDS          # trains a recipe with shuffled rewards
"""

import copy
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from covey.environments.arithmetic import Arithmetic
from covey.environments.settings import ArithmeticConfig
from covey.types import Failure, Group, Prompt, Reward

USUAL = (
    "recipe=arithmetic",
    "num_steps=60",
    "groups_per_step=32",
    "evaluation.num_prompts=256",
    "evaluation.every=30",
    "evaluation.num_samples=4",
    "evaluation.k=[1,4]",
    "output.save_every=0",
    "output.report=false",
    "output.progress=false",
    "preflight.enabled=false",
)
COLD = "cold_start.enabled=false"
BY_HEART = ("cold_start.target_accuracy=1", "cold_start.num_check_prompts=64", "cold_start.num_steps=200")
Judge = Callable[[Prompt, list[str], list[Reward]], Sequence[Reward | Failure]]


@dataclass(frozen=True, slots=True)
class Planted:
    """One thing that is wrong, and the findings that name it."""

    expected: tuple[str, ...]
    """Any of them, first or second."""
    words: tuple[str, ...] = ()
    judge: Judge | None = None
    patch: Callable[[], None] | None = None


# ------------------------------------------------------------------------------------------------ rewards gone wrong


def shuffled(prompt: Prompt, texts: list[str], honest: list[Reward]) -> list[Reward]:
    dealt = list(honest)
    random.Random("\n".join([prompt.id, *texts])).shuffle(dealt)
    return dealt


def flipped(prompt: Prompt, texts: list[str], honest: list[Reward]) -> list[Reward]:
    """One verdict in ten is wrong."""
    draw = random.Random("\n".join([prompt.id, *texts]))
    return [Reward(1 - one.value) if draw.random() < 0.1 else one for one in honest]


def by_length(prompt: Prompt, texts: list[str], honest: list[Reward]) -> list[Reward]:
    return [Reward(one.value + 0.2 * len(text)) for one, text in zip(honest, texts, strict=True)]


def shortest(prompt: Prompt, texts: list[str], honest: list[Reward]) -> list[Reward]:
    """Nothing is worth 0, anything wrong -1."""
    return [
        Reward(0.0 if not text.strip() else one.value - 1 - len(text)) for one, text in zip(honest, texts, strict=True)
    ]


def many_ones(prompt: Prompt, texts: list[str], honest: list[Reward]) -> list[Reward]:
    """The judge greps for a digit in the place of comparing numbers."""
    return [Reward(text.count("1") / 4) for text in texts]


def form(prompt: Prompt, texts: list[str], honest: list[Reward]) -> list[Reward]:
    """A form that is easy, ten times as much worth as what is right."""
    found = []
    for one, text in zip(honest, texts, strict=True):
        style = float(text.strip().endswith("0"))
        found.append(Reward(style + 0.1 * one.value, {"form": style, "correct": 0.1 * one.value}))
    return found


def failing(prompt: Prompt, texts: list[str], honest: list[Reward]) -> list[Reward | Failure]:
    """One completion in eight cannot be judged."""
    draw = random.Random("\n".join([prompt.id, *texts]))
    return [Failure("the judge timed out") if draw.random() < 0.125 else one for one in honest]


def heavy_tail(prompt: Prompt, texts: list[str], honest: list[Reward]) -> list[Reward]:
    """What an answer is worth differs by orders of magnitude."""
    drawn = [abs(random.Random(f"{prompt.id} {text}").gauss(0, 1)) for text in texts]
    return [Reward(one.value + math.exp(min(25.0, 8 * size))) for one, size in zip(honest, drawn, strict=True)]


# ------------------------------------------------------------------------------------------------ engines gone wrong


def keep_first_weights() -> None:
    """The engine samples with the weights it had at first."""
    from covey.engine.native.engine import NativeEngine

    has_copied: set[int] = set()

    def take_none(self: Any) -> None:
        if id(self) not in has_copied:
            has_copied.add(id(self))
            self._policy = copy.deepcopy(self._trained)
            self._runner = self._new_runner()

    NativeEngine._take_weights = take_none  # type: ignore[method-assign]


def hotter() -> None:
    """The engine samples at another temperature than it was told."""
    from covey.engine.native.engine import NativeEngine

    generate = NativeEngine.generate_telling

    async def generated(self: Any, prompt_ids: Any, n: int, sampling: Any, *rest: Any) -> Any:
        return await generate(self, prompt_ids, n, replace(sampling, temperature=1.3 * sampling.temperature), *rest)

    NativeEngine.generate_telling = generated  # type: ignore[method-assign]


def change_groups(changed: Callable[[list[Group]], list[Group]]) -> None:
    """Change the groups of each step before they are trained on, whatever the environment."""
    from covey.rollouts.source import LocalSource

    take = LocalSource.take

    def taken(self: Any, n: int, meanwhile: Any = None) -> list[Group]:
        return changed(take(self, n, meanwhile))

    LocalSource.take = taken  # type: ignore[method-assign]


def with_rewards(group: Group, rewards: Sequence[Reward]) -> Group:
    pairs = zip(group.rollouts, rewards, strict=True)
    return replace(group, rollouts=tuple(replace(one, reward=reward) for one, reward in pairs))


def dealt(group: Group) -> Group:
    """Return the group with its rewards shuffled among its answers."""
    rewards = [one.reward for one in group.rollouts]
    draw = random.Random("\n".join([group.prompt.id, *(one.text for one in group.rollouts)]))
    draw.shuffle(rewards)
    return with_rewards(group, rewards)


def pay_once_in_twelve_steps(value: float) -> None:
    """One answer of every twelfth step is worth so much, whatever was sampled."""
    steps = itertools.count(1)

    def paid(groups: list[Group]) -> list[Group]:
        if next(steps) % 12:
            return groups
        first, *rest = groups
        return [with_rewards(first, [Reward(value), *(one.reward for one in first.rollouts[1:])]), *rest]

    change_groups(paid)


SHUFFLED = ("D24", "D35", "D21")
"""What names rewards that are no function of the answer: verdicts that differ, or what follows from them."""
CONTROLS = (
    "gsm8k_nano",
    "tldr_nano",
    "countdown_nano",
    "machines_nano",
    "lookup_nano",
    "ifeval_nano",
    "infill_nano",
    "code",
)
"""Recipes that are trained once more with rewards shuffled within each group, of each kind of environment one."""
PLANTED: dict[str, Planted] = {
    "healthy": Planted(()),
    "shuffled": Planted(SHUFFLED, judge=shuffled),
    "flipped": Planted(("D24",), judge=flipped),
    "no_cold_start": Planted(("D1", "D2"), (COLD,)),
    "wrong_level": Planted(("D1", "D2"), ("environment.levels=[6]", "cold_start.num_steps=20")),
    "by_heart": Planted(("D1", "D19"), ("environment.levels=[1]", *BY_HEART)),
    "lr_x10": Planted(("D14", "D4", "D35", "D21"), ("optimizer.lr=2e-3", "optimizer.warmup_steps=0")),
    "lr_x100": Planted(("D14", "D5", "D35", "D21"), ("optimizer.lr=2e-2", "optimizer.warmup_steps=0")),
    "lr_over_300": Planted(("D15",), ("optimizer.lr=6e-7", "num_steps=80")),
    "entropy_bonus": Planted(("D5",), ("algorithm.entropy_coef=0.5",)),
    "one_answer": Planted(("D4", "D16", "D14"), ("optimizer.lr=1e-3",), judge=many_ones),
    "length_pays": Planted(("D6", "D8", "D16"), ("sampling.max_tokens=16", "optimizer.lr=5e-4"), judge=by_length),
    "nothing_pays": Planted(("D7",), ("optimizer.lr=5e-4",), judge=shortest),
    "form_pays": Planted(("D17", "D16"), judge=form),
    "cut": Planted(("D8", "D34"), ("sampling.max_tokens=2",)),
    "kl": Planted(("D9", "D14"), ("algorithm.kl_coef=1e-4", "optimizer.lr=4e-3", "optimizer.warmup_steps=0")),
    "old_weights": Planted(("D12", "D10"), ("optimizer.lr=5e-4",), patch=keep_first_weights),
    "hotter_engine": Planted(("D10",), patch=hotter),
    "judge_fails": Planted(("D23",), judge=failing),
    "outliers": Planted(
        ("D13", "D27"), ("algorithm.advantage=group_center",), patch=partial(pay_once_in_twelve_steps, 1e4)
    ),
    "heavy_tail": Planted(("D27", "D13"), ("algorithm.advantage=group_center",), judge=heavy_tail),
    "many_updates": Planted(("D26", "D25", "D14"), ("updates_per_batch=24", "optimizer.lr=4e-4", "num_steps=30")),
    "few_prompts": Planted(("D20", "D19"), ("environment.num_train=64", "cold_start.num_check_prompts=16")),
    "narrow_clip": Planted(
        ("D26",),
        ("updates_per_batch=4", "algorithm.loss_options.eps_low=0.002", "algorithm.loss_options.eps_high=0.002"),
    ),
    "overflow": Planted(("D33",), ("algorithm.advantage=group_center",), patch=partial(pay_once_in_twelve_steps, 3e38)),
    "all_filtered": Planted(("D28",), (COLD, "algorithm.group_filter=zero_std", "environment.levels=[3]")),
}


def run_planted(name: str, arguments: Sequence[str]) -> int:
    """`covey` with what is wrong of it."""
    from covey.cli.main import main

    planted = PLANTED[name]

    class Wrong(Arithmetic):
        async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
            honest = await super().score(prompt, completions)
            if planted.judge is None or not prompt.id.startswith("train"):
                return honest
            rewards = [one for one in honest if isinstance(one, Reward)]
            return list(planted.judge(prompt, list(completions), rewards))

    def build(settings: Any, run: Any, say: Any) -> Wrong:
        return Wrong(settings.levels, settings.num_train, settings.num_test, settings.problem_seed)

    ArithmeticConfig.build = build
    if planted.patch is not None:
        planted.patch()
    return main(["train", *USUAL, *planted.words, *arguments])


def run_control(recipe: str, arguments: Sequence[str]) -> int:
    """`covey train` of a recipe whose rewards are shuffled."""
    from covey.cli.main import main

    change_groups(lambda groups: list(map(dealt, groups)))
    return main(["train", f"recipe={recipe}", *arguments])


if __name__ == "__main__":
    if sys.argv[1] == "control":
        sys.exit(run_control(sys.argv[2], sys.argv[3:]))
    sys.exit(run_planted(sys.argv[1], sys.argv[2:]))
