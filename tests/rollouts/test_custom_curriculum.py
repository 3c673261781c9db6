"""A curriculum of your own: a class that is named in the settings, tried before the first step, resumed exactly."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.loop import train
from covey.rollouts.stream import PromptStream
from covey.run.build import build_run
from covey.system.waits.timer import PhaseTimer
from covey_preflight.custom import check_custom
from covey_preflight.subject import Check, PreflightContext

from ..support.small import rows, scripted, small_config, timeless, use

HARDEST = '''
class Hardest:
    """Twice the prompt that was solved least, then the next one in order."""

    def __init__(self, prompts, seed, shuffle, *, rate=0.5):
        self.prompts, self.seed, self.rate = prompts, seed, rate
        self.position, self.solved, self.told = 0, {}, 0

    def draw(self, n):
        drawn = []
        for _ in range(n):
            chosen = self.prompts[self.position % len(self.prompts)]
            if self.solved and self.position % 3:
                name = min(self.solved, key=self.solved.get)
                (chosen,) = [prompt for prompt in self.prompts if prompt.id == name]
            drawn.append((chosen, self.position))
            self.position += 1
        return drawn

    def learn(self, outcomes):
        for outcome in outcomes:
            before = self.solved.get(outcome.prompt_id, 0.5)
            self.solved[outcome.prompt_id] = before + self.rate * (outcome.success - before)
        self.told += len(outcomes)

    def take_metrics(self):
        return {"told": float(self.told)}

    def state_dict(self):
        return {"position": self.position, "solved": dict(self.solved), "told": self.told}

    def load_state_dict(self, state):
        self.position, self.solved, self.told = state["position"], dict(state["solved"]), state["told"]
'''
"""The class begins on line 2 of its file."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_order", None)


def write(folder: Path, old: str = "", new: str = "") -> None:
    """The class, with one change."""
    assert old in HARDEST
    (folder / "my_order.py").write_text(HARDEST.replace(old, new) if old else HARDEST)
    importlib.invalidate_caches()


def checked(**changes: Any) -> Check:
    config = small_config(curriculum__name="my_order:Hardest", **changes)
    run = build_run(config, scripted(), PhaseTimer())
    before = run.source.state_dict()
    found = check_custom(PreflightContext(run, config))
    if found.passed:
        assert run.source.state_dict() == before
    run.close()
    return found


def test_one_that_is_right_passes_and_stays_where_it_was(folder: Path) -> None:
    write(folder)
    found = checked(curriculum__options={"rate": 0.2})
    assert (found.passed, found.figure) == (True, "my_order:Hardest tried on made-up inputs")


PAIRS = "give 64 pairs (prompt, number) for draw(64)"
MISTAKES = {
    "no state": (
        "    def state_dict",
        "    def state",
        "have prompts, seed, position, draw, state_dict, load_state_dict",
    ),
    "other arguments": ("prompts, seed, shuffle, *", "prompts, *", "take (prompts, seed, shuffle), got too many"),
    "raises": ("min(self.solved,", "min(self.unsolved,", "raised AttributeError: 'Hardest' object has no attribute 'u"),
    "too few": ("        return drawn", "        return drawn[1:]", f"must {PAIRS}, got [(Prompt("),
    "no number": ("append((chosen, self.position))", "append(chosen)", f"must {PAIRS}, got Prompt(id='train-0'"),
    "the same number": ("append((chosen, self.position))", "append((chosen, 0))", "must give a prompt another number"),
    "does not count": ("            self.position += 1\n", "", "must give a prompt another number"),
    "counts double": ("            self.position += 1", "            self.position += 2", "must count what it drew"),
    "state is forgotten": (
        ', "solved": dict(self.solved)',
        ', "solved": {}',
        "must draw the same prompts from the same",
    ),
    "a set in the state": ('"solved": dict(self.solved)', '"solved": set(self.solved)', "raised"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, folder: Path) -> None:
    old, new, said = MISTAKES[name]
    write(folder, old, new)
    try:
        found = checked()
        assert not found.passed
        line = found.figure
    except ValueError as error:  # it could not even be built
        line = str(error)
    assert said in line
    assert line.startswith("curriculum.name=my_order:Hardest ")
    assert "(my_order.py:" in line
    assert "\n" not in line


@pytest.mark.long
def test_it_decides_what_is_trained_and_a_resumed_run_is_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder)
    use(monkeypatch, scripted())
    settings = {"curriculum__name": "my_order:Hardest", "num_steps": 4, "output__save_every": 2}
    train(small_config(**settings), folder / "whole")
    train(small_config(**settings | {"num_steps": 2}), folder / "resumed")
    again = {"resume": str(folder / "resumed"), "resume_changes": ["num_steps"]}
    train(small_config(**settings | again), folder / "resumed")
    whole, resumed = (timeless(rows(folder / name / "metrics.jsonl", "train")) for name in ("whole", "resumed"))
    assert whole == resumed
    assert [row["curriculum/told"] for row in whole] == [2.0, 4.0, 6.0, 8.0]
    plain = PromptStream(scripted().prompts("train"), seed=0, shuffle=True)
    drawn = [row["prompt_id"] for row in rows(folder / "whole" / "rollouts.jsonl")][::4]
    assert drawn != [prompt.id for prompt, _ in plain.draw(8)]
