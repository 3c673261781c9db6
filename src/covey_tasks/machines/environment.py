"""The environment: machines are asked for, read, placed, simulated and scored.

R = R_valid * R_task: what is no machine scores 0, everything else what physics says (arXiv 2510.14980).
"""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from covey.environments.base import Environment, Split
from covey.environments.data.rows import load_rows, row_settings
from covey.environments.settings import BuildSettings
from covey.types import Failure, Prompt, Reward
from covey_tasks.machines.design.demonstrations import Design, capped, make_designs
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.stages import STAGES, Problem, check_problem, stage_problems
from covey_tasks.machines.design.tree import canonical
from covey_tasks.machines.design.types import Invalid, Machine
from covey_tasks.machines.physics.simulators import CachedSimulators, Simulators
from covey_tasks.machines.physics.trajectory import Ending, Outcome
from covey_tasks.machines.prompts import make_prompt, read_answer, write_answer
from covey_tasks.machines.rows import Example, problem_of, read_examples
from covey_tasks.machines.scores import TRANSFORMS, find_score
from covey_tasks.machines.settings import MachinesConfig

LOGGER = logging.getLogger(__name__)


class Machines(Environment):
    """Environment of machines.

    >>> problems = {"train": stage_problems(["car"], 4, 48, random.Random(0)), "test": []}
    >>> Machines(problems, CachedSimulators(Simulators(), 65536), MachinesConfig())
    """

    def __init__(
        self,
        problems: Mapping[Split, Sequence[Problem]],
        simulators: CachedSimulators,
        settings: MachinesConfig | None = None,
        examples: Sequence[Example] = (),
        answered: Sequence[Problem] = (),
    ) -> None:
        """Take over the simulators: `close` closes them.

        Demonstrations are the `examples`, else designs that answer `answered`, else the stages.
        """
        self._settings = settings or MachinesConfig()
        self._answered = answered
        self._examples = examples
        self._simulators = simulators
        asked = [*(one for split in problems.values() for one in split), *(example.problem for example in examples)]
        stages = dict.fromkeys([*self._settings.stages, *(problem.stage for problem in asked)])
        self._scores = {stage: find_score(STAGES[stage].task, self._settings.score) for stage in stages}
        self._prompts = {
            split: [self._prompt(split, index, problem) for index, problem in enumerate(problems[split])]
            for split in problems
        }
        self._tally = StepStats()

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        problem = self._problem(prompt)
        found = [self._machine(completion, problem) for completion in completions]
        outcomes = await asyncio.gather(*(self._outcome(machine, problem) for machine in found))
        pairs = zip(found, outcomes, strict=True)
        judged = [self._judge(machine, outcome, problem) for machine, outcome in pairs]
        self._tally.add(found, judged, [one.ending for one in outcomes if isinstance(one, Outcome)])
        return [
            score if isinstance(score, Failure) else self._reward(machine, score)
            for machine, score in zip(found, judged, strict=True)
        ]

    def difficulty(self, prompt: Prompt) -> int:
        return STAGES[self._problem(prompt).stage].difficulty

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        """Show the examples given, or designs, none of them good on purpose."""
        examples, how = self._examples, self._settings
        if not examples:
            designs = make_designs(how, self._answered)
            if how.demonstration_cap < 1:
                designs = capped(designs, asyncio.run(self._raw_scores(designs)), how.demonstration_cap)
            examples = [Example(one.problem, write_answer(one.tree, one.problem, how.form)) for one in designs]
        return [
            (self._prompt(split, index, example.problem, "demonstration-"), example.text)
            for index, example in enumerate(examples)
        ]

    @property
    def part_weights(self) -> Mapping[str, float]:
        shaping = {"file_valid": self._settings.file_reward, "machine_valid": self._settings.placed_reward}
        return shaping | {"performance": 1.0, "score": 0.0, "nonzero": 0.0}

    def metrics(self) -> dict[str, float]:
        asked, simulated = self._simulators.take_counts()
        found = self._tally.take()
        return found | {"simulated_fraction": simulated / asked} if asked else found

    def facts(self) -> dict[str, Any]:
        scores = {stage: score.name for stage, score in self._scores.items()}
        return {"physics_version": self._simulators.version, "scores": scores}

    def close(self) -> None:
        self._simulators.close()

    def _prompt(self, split: Split, index: int, problem: Problem, kind: str = "") -> Prompt:
        name, how = self._scores[problem.stage].name, self._settings
        made = make_prompt(split, index, problem, how.form, name, how.instruction)
        return replace(made, id=kind + made.id)

    def _problem(self, prompt: Prompt) -> Problem:
        """Return a prompt's problem; text alone asks for the only stage."""
        return prompt.columns.get("problem") or problem_of({"prompt": prompt.text}, self._settings)

    def _machine(self, completion: str, problem: Problem) -> Machine | Invalid:
        tree = read_answer(completion, problem, self._settings.form)
        if isinstance(tree, Invalid):
            return tree
        return check_problem(tree, problem) or place(tree, problem.rules)

    async def _outcome(self, machine: Machine | Invalid, problem: Problem) -> Outcome | Failure | None:
        """Simulate a machine. None where nothing is simulated."""
        if not _is_answer(machine, problem) or STAGES[problem.stage].pays_validity:
            return None
        assert isinstance(machine, Machine)
        return await self._simulators.run(machine.tree, self._scores[problem.stage].world)

    def _judge(
        self, machine: Machine | Invalid, outcome: Outcome | Failure | None, problem: Problem
    ) -> float | Failure:
        """Compute R_valid * R_task, not transformed."""
        if isinstance(outcome, Outcome):
            return self._scores[problem.stage].of(outcome)
        if outcome is not None:
            return outcome
        return float(STAGES[problem.stage].pays_validity and _is_answer(machine, problem))

    async def _raw_scores(self, designs: Sequence[Design]) -> list[float]:
        found = [place(design.tree, design.problem.rules) for design in designs]
        problems = [design.problem for design in designs]
        pairs = zip(found, problems, strict=True)
        outcomes = await asyncio.gather(*(self._outcome(machine, problem) for machine, problem in pairs))
        judged = map(self._judge, found, outcomes, problems)
        return [0.0 if isinstance(score, Failure) else score for score in judged]

    def _reward(self, machine: Machine | Invalid, score: float) -> Reward:
        has_file = not isinstance(machine, Invalid) or machine.stage != "file"
        parts = {
            "file_valid": float(has_file),
            "machine_valid": float(isinstance(machine, Machine)),
            "performance": TRANSFORMS[self._settings.transform](score),
            "score": score,
            "nonzero": float(score > 0),
        }
        return Reward(sum(weight * parts[name] for name, weight in self.part_weights.items()), parts)


def build_machines(settings: MachinesConfig, config: BuildSettings) -> Environment:
    most, seed = settings.max_blocks, settings.problem_seed
    if config.data.path is not None:
        how_to_read = row_settings(config.data, ("prompt",), make=partial(problem_of, settings=settings))
        problems = load_rows(config.data.path, how_to_read).splits
    else:
        counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
        problems = {
            split: stage_problems(settings.stages, count, most, random.Random(f"machines {split} {seed}"))
            for split, count in counts.items()
        }
    examples = [] if settings.demonstrations is None else read_examples(settings.demonstrations, settings)
    if examples:
        LOGGER.info("%s: %d designs, all of them machines", settings.demonstrations, len(examples))
    answered = () if config.data.path is None else problems["train"]
    simulators = CachedSimulators(Simulators(settings.num_workers, settings.timeout), settings.cache_size)
    return Machines(problems, simulators, settings, examples, answered)


def _is_answer(machine: Machine | Invalid, problem: Problem) -> bool:
    return isinstance(machine, Machine) and len(machine.tree) >= STAGES[problem.stage].min_blocks


@dataclass(slots=True)
class StepStats:
    """Counts group by group until it is asked."""

    scores: list[list[float]] = field(default_factory=list)
    """Scores of each group, without machines that the system failed to score."""
    num_unique: list[int] = field(default_factory=list)
    """Different valid machines of each group."""
    codes: list[str] = field(default_factory=list)
    """Codes of all answers; empty for valid machines."""
    endings: list[Ending] = field(default_factory=list)
    """Endings of simulated machines."""

    def add(
        self, machines: Sequence[Machine | Invalid], scores: Sequence[float | Failure], endings: Sequence[Ending]
    ) -> None:
        self.scores.append([score for score in scores if not isinstance(score, Failure)])
        self.num_unique.append(len({canonical(found.tree) for found in machines if isinstance(found, Machine)}))
        self.codes += [found.code if isinstance(found, Invalid) else "" for found in machines]
        self.endings += endings

    def take(self) -> dict[str, float]:
        groups, unique, codes = [group for group in self.scores if group], self.num_unique, self.codes
        reasons = [code for code in codes if code] + [ending for ending in self.endings if ending != "complete"]
        self.scores, self.num_unique, self.codes, self.endings = [], [], [], []
        if not groups:
            return {}
        every = [score for group in groups for score in group]
        placed = [code for code in codes if code in ("", "overlap", "size", "boulder")]
        found = {
            "score_mean": sum(every) / len(every),
            "score_max": max(every),
            "unique_machines": sum(unique) / len(unique),
            **{f"invalid/{reason}": reasons.count(reason) / len(codes) for reason in sorted(set(reasons))},
        }
        if placed:  # of the texts that are trees
            found["spatial_validity"] = sum(code in ("", "boulder") for code in placed) / len(placed)
        return found | _best_at(groups)


def _best_at(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compute Best@N over the largest groups, N being powers of two."""
    largest = max(map(len, groups))
    chosen = [group for group in groups if len(group) == largest]
    sizes = [2**power for power in range(7) if 2**power <= largest]
    return {f"best_at_{size}": sum(best_of(group, size) for group in chosen) / len(chosen) for size in sizes}


def best_of(scores: Sequence[float], size: int) -> float:
    """Compute the expected best of `size` scores drawn with replacement.

    >>> best_of([0.0, 4.0], 2)
    3.0
    """
    ranked, count = sorted(scores), len(scores)
    return sum(
        score * ((rank / count) ** size - ((rank - 1) / count) ** size) for rank, score in enumerate(ranked, start=1)
    )
