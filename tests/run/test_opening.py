"""The line a run begins with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from covey.run.build import Run, build_environment, build_run
from covey.run.stages import doubts, opening, size_of
from covey.system.text.format import count
from covey.system.waits.timer import PhaseTimer
from covey_tasks.code.settings import CodeConfig

from ..support.builders import nano
from ..support.small import scripted, small_config, use


@contextmanager
def begun(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[Run]:
    use(monkeypatch, scripted())
    config = small_config(**changes)
    run = build_run(config, build_environment(config), PhaseTimer())
    yield run
    run.close()


def test_it_says_what_is_trained_on_what_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(monkeypatch, num_steps=9) as run:
        weights = sum(p.numel() for p in run.policy.model.parameters())
        assert opening(run) == (
            f"nano: {count(weights)} parameters, all trained in float32; 6 prompts to train on, 3 held out "
            "(2 of them evaluated); 2 x 4 completions a step, 9 steps: 3 passes over the prompts"
        )
        assert not list(doubts(run))
    with begun(monkeypatch, num_steps=3) as run:
        assert opening(run).endswith("3 steps: 1 pass over the prompts")
        run = replace(run, config=replace(run.config, environment=CodeConfig()))
        assert "; 6 prompts made up (data.path=null) to train on, 3 held out " in opening(run)


def test_adapters_are_the_only_weights_that_train() -> None:
    policy = nano(lora_rank=2)
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in policy.model.parameters())
    share = f"{100 * trained / whole:.1f} %"
    assert size_of(policy) == f"{count(whole)} parameters, {count(trained)} of them trained ({share}) in float32"
    assert 0 < trained < whole / 4


def test_a_step_of_more_prompts_than_there_are_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(monkeypatch, groups_per_step=15) as run:
        (line,) = doubts(run)
        assert line.startswith("groups_per_step=15 takes each of 6 training prompts 2.5 times a step;")


def test_a_prompt_without_room_is_a_warning_where_nothing_else_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with begun(monkeypatch, sampling__max_tokens=4095, preflight__enabled=False) as run:
        assert list(doubts(run)) == [
            "prompt train-0 has 9 tokens and there is room for 1: it ends the run when it is drawn; "
            "data.bad_rows=skip leaves such prompts out"
        ]
    with begun(monkeypatch, sampling__max_tokens=4095) as run:
        assert not list(doubts(run))


def test_a_curriculum_has_no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(monkeypatch, curriculum__name="success") as run:
        assert opening(run).endswith("2 x 4 completions a step, 2 steps")


@pytest.mark.parametrize(
    ("rate", "rank", "name", "warns"),
    [(4e-6, 16, "adamw", True), (5e-6, 16, "adamw", False), (1e-6, 0, "adamw", False), (1e-6, 16, "sgd", False)],
)
def test_adapters_whose_rate_hardly_moves_them_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, rate: float, rank: int, name: str, warns: bool
) -> None:
    with begun(monkeypatch, optimizer__lr=rate, model__lora_rank=rank, optimizer__name=name) as run:
        said = [line.partition(":")[0] for line in doubts(run)]
    assert said == ["optimizer.lr=4e-06 hardly moves adapters (model.lora_rank=16)"] * warns
