"""Measuring and checking sample in process, whatever the source of the run: samplers are for training."""

from pathlib import Path

import pytest

from covey.cli.commands import run_evaluate
from covey.cli.flags import EvaluationAsked
from covey.loop import train
from covey_preflight.command import run_check

from ..support.fake_ray import fake_ray
from ..support.small import rows, scripted, small_config, use

RAY = {"source": "ray", "max_staleness": 1}


@pytest.mark.long
def test_a_policy_is_evaluated_without_samplers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    train(small_config(), tmp_path / "run")
    (tmp_path / "found").mkdir()
    policy = tmp_path / "run" / "checkpoints" / "step-000002" / "policy"
    with fake_ray() as ray:
        run_evaluate(small_config(model__name=str(policy), **RAY), tmp_path / "found", EvaluationAsked())
    assert ray.actors == []
    assert len(rows(tmp_path / "found" / "metrics.jsonl", "evaluate")) == 1


@pytest.mark.long
def test_a_run_with_samplers_is_checked_without_starting_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted())
    with fake_ray() as ray:
        run_check(small_config(**RAY), tmp_path)
    assert ray.actors == []
    shown = " ".join(capsys.readouterr().out.split())
    assert "each sampler" in shown
