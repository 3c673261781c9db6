"""The preflight within a run and as `covey check`: it leaves no trace, and it stops what it refuses."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.cli.main import main
from covey.config.schema import Config
from covey.engine.base import EngineStats
from covey.environments.arithmetic import Arithmetic
from covey.loop import train
from covey.run.build import build_run
from covey.run.state import generators
from covey.system.waits.timer import PhaseTimer
from covey_preflight.preflight import leaving_no_trace, run_checks, write
from covey_preflight.subject import Check, PreflightContext

from ..support.small import logging_as_it_was, rows, small_config, timeless, use, varied, words
from .looked_at import Golden, subjects, use_engine


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COVEY_DEBUG", raising=False)
    with logging_as_it_was():
        yield


def golden() -> Golden:
    """Rewards that random completions differ in, and a completion that gets 1."""
    return Golden(varied, lambda prompt: "\x04")


# ------------------------------------------------------------------------------------------------ no trace


def outcome(folder: Path, **changes: Any) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """The final weights as they lie on disk, and what was logged."""
    folder.mkdir()
    train(small_config(**changes), folder)
    policy = max((folder / "checkpoints").glob("step-*")) / "policy"
    weights = {path.name: path.read_bytes() for path in policy.glob("*.safetensors")}
    return weights, timeless([*rows(folder / "metrics.jsonl"), *rows(folder / "rollouts.jsonl")])


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__lora_rank": 2, "model__lora_dropout": 0.5},
        {"algorithm__kl_coef": 0.1, "algorithm__target_kl": 0.01, "updates_per_batch": 2},
        {"algorithm__reference_refresh_every": 1, "algorithm__kl_coef": 0.1, "sampling__top_p": 0.9},
        {"algorithm__advantage": "role_ema", "model__gradient_checkpointing": True},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_a_run_ends_with_the_same_bytes_whether_it_was_checked_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    use(monkeypatch, golden())
    checked = outcome(tmp_path / "checked", **changes)
    use(monkeypatch, golden())
    unchecked = outcome(tmp_path / "unchecked", **changes, preflight__enabled=False)
    assert (tmp_path / "checked" / "preflight.json").is_file()
    assert not (tmp_path / "unchecked" / "preflight.json").exists()
    assert checked[0].keys()
    assert checked == unchecked


@pytest.mark.long
def test_weights_gradients_generators_stream_engine_and_controllers_are_as_before() -> None:
    with subjects() as build:
        subject = build(golden(), model__lora_rank=2, model__lora_dropout=0.5, algorithm__kl_coef=0.1)
        run = subject.run
        run.policy.model.train()
        weights = {name: p.detach().clone() for name, p in run.policy.model.named_parameters()}
        before = (run.source.state_dict(), run.credit.state_dict(), run.trainer.controller, run.trainer.entropy)
        states, state = generators(), run.trainer.state_dict()
        run_checks(subject)
        assert all(torch.equal(p, weights[name]) for name, p in run.policy.model.named_parameters())
        assert all(p.grad is None for p in run.policy.model.parameters())
        assert run.policy.model.training
        assert {m.p for m in run.policy.model.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}
        assert before == (
            *(run.source.state_dict(), run.credit.state_dict(), run.trainer.controller, run.trainer.entropy),
        )
        assert run.trainer.state_dict() == state
        assert torch.equal(generators()["torch"], states["torch"])
        assert generators()["python"] == states["python"]
        assert run.source.sampler.engine.take_stats() == EngineStats()
        assert run.source.take_drops() == {}
        assert run.source.sampler.environment is run.environment


def test_generators_are_put_back_even_where_a_check_fails() -> None:
    with subjects() as build:
        run = build().run
        before = generators()

        def draw() -> None:
            with leaving_no_trace(run):
                torch.rand(3)
                np.random.rand(3)
                raise KeyError

        with pytest.raises(KeyError):
            draw()
        after = generators()
        assert torch.equal(after["torch"], before["torch"])
        assert torch.equal(after["numpy"][1], before["numpy"][1])
        assert after["numpy"][2] == before["numpy"][2]


# ------------------------------------------------------------------------------------------------ within a run


def report(folder: str = "run") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(folder, "preflight.json").read_text())
    return found


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine(monkeypatch, spoil=lambda c: replace(c, logprobs=tuple(p + 0.01 for p in c.logprobs)))


@pytest.mark.long
def test_a_refused_run_ends_before_its_first_step_with_the_report_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch)
    assert main(["train", *words(), "hydra.run.dir=run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("covey: preflight: log-probs: engine and trainer differ by 0.01 nats at most")
    assert error.count("\n") == 1
    assert rows(Path("run/metrics.jsonl")) == []
    failed = [check for check in report() if not check["passed"]]
    assert [check["name"] for check in failed] == ["log-probs"]
    assert failed[0]["values"]["max"] == pytest.approx(0.01, abs=1e-4)
    assert failed[0]["remedy"]


def test_a_figure_that_is_not_a_number_is_null_in_the_report(tmp_path: Path) -> None:
    write([Check(False, "?", "1", "!", {"shared/9": math.nan, "padded/9": 0.5}, name="gradient")], tmp_path)
    assert report(str(tmp_path))[0]["values"] == {"shared/9": None, "padded/9": 0.5}


@pytest.mark.long
def test_a_run_that_passes_says_so_and_keeps_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words(), "hydra.run.dir=run"]) == 0
    assert "\npreflight: 10 checks passed in " in capsys.readouterr().out
    assert [check["passed"] for check in report()] == [True] * 10
    assert set(report()[0]) == {"name", "passed", "figure", "tolerance", "remedy", "values", "seconds", "applies"}
    assert "preflight" in json.loads(Path("run/summary.json").read_text())["phases"]


@pytest.mark.long
def test_a_disabled_preflight_check_lets_any_run_train(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    assert main(["train", *words(preflight__enabled=False), "hydra.run.dir=run"]) == 0
    assert not Path("run/preflight.json").exists()


def test_a_resumed_run_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["train", *words(num_steps=1), "hydra.run.dir=run"]) == 0
    Path("run/preflight.json").unlink()
    spoil(monkeypatch)
    assert main(["train", "resume=run", "num_steps=2", "resume_changes=[num_steps]"]) == 0
    assert not Path("run/preflight.json").exists()


def test_the_policy_of_the_cold_start_is_the_one_that_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "covey_preflight.preflight.before_training", lambda run, record: seen.append(run.policy.model.name_or_path)
    )
    warm = {"cold_start__enabled": True, "cold_start__num_steps": 1, "cold_start__num_check_prompts": 2}
    assert main(["train", *words(**warm), "hydra.run.dir=run"]) == 0
    assert "cold-start-" in seen[0]


# ------------------------------------------------------------------------------------------------ covey check


@pytest.mark.long
def test_covey_check_shows_every_check_and_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words(), "hydra.run.dir=run"]) == 0
    out = capsys.readouterr().out
    for check in report():
        assert f"\n{check['name']}" in out
    assert out.count(" passed ") == 10
    said = [f"preflight {number} of 10: {check['name']}" for number, check in enumerate(report(), start=1)]
    assert [line for line in out.splitlines() if re.match(r"preflight \d", line)] == said
    assert "FAILED" not in out
    assert not Path("run/checkpoints").exists()
    assert rows(Path("run/metrics.jsonl")) == []


@pytest.mark.long
def test_covey_check_ends_with_the_first_failure_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch)
    assert main(["check", *words(), "hydra.run.dir=run"]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("FAILED") == 2
    assert printed.out.count(" passed ") == 8
    assert printed.err.splitlines()[-1].startswith("covey: preflight: log-probs: ")


def test_covey_check_needs_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words(preflight__enabled=False)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "covey: covey check needs preflight.enabled=true, got preflight.enabled=false"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_make_the_checks_together(strategy: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "covey"]
    settings = words(parallel__strategy=strategy, sampling__max_tokens=32)
    run = [*launcher, "check", *settings, "hydra.run.dir=run"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" passed ") == 10
    assert [check["passed"] for check in report()] == [True] * 10


@pytest.mark.slow
def test_the_checks_of_the_demonstration_take_less_than_ten_seconds() -> None:
    config = Config(groups_per_step=64)
    config.sampling.max_tokens = 8
    run = build_run(config, Arithmetic(levels=[3]), PhaseTimer())
    try:
        assert sum(check.seconds for check in run_checks(PreflightContext(run, config))) < 10
    finally:
        run.close()
