"""Terminal, `covey doctor`, `show`, report, its text and `doctor.stop_on` say the same of the same run."""

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from covey.algorithm.intervals import SHARE, mean_interval, wilson
from covey.config.schema import Config, DoctorConfig
from covey.loop import train
from covey.run.checkpoints.fingerprint import of_prompts
from covey.run.evaluate import Evaluation, numbers_of
from covey.run.folder import read_summary
from covey.run.records.callbacks import StopTraining
from covey.run.records.rollout_log import verdict_row
from covey.run.records.summary import RunFacts, summary, write_summary
from covey.types import Prompt
from covey_doctor.diagnose import diagnose
from covey_doctor.finding import Level
from covey_doctor.verdicts import with_prompts
from covey_report.doctor.command import run_doctor
from covey_report.doctor.health import health_of, run_log
from covey_report.doctor.live import Doctor
from covey_report.logs.read import read_run
from covey_report.page.content import content, verdict
from covey_report.runs.outcome import outcome_of
from covey_report.runs.show import run_show
from covey_report.runs.tables import _cell, print_summary
from covey_report.text import as_lines

from ..support.small import rows, scripted, small_config, use

STEPS = 120


@dataclass(frozen=True)
class Kind:
    """How a simulated run goes: from one success rate to another, of so many held-out prompts, looked at so often."""

    first: float
    last: float
    prompts: int
    every: int
    samples: int = 4


HEALTHY = (
    Kind(0.27, 0.72, 512, 50),
    Kind(0.30, 0.60, 256, 3),  # forty looks
    Kind(0.50, 0.50, 128, 10),  # nothing is learnt
    Kind(0.70, 0.97, 64, 20),
    Kind(0.10, 0.40, 32, 40),
    Kind(0.02, 0.30, 16, 30),
    Kind(0.95, 0.99, 512, 3),
)


def looks_of(kind: Kind, draw: random.Random) -> Iterator[tuple[int, Evaluation]]:
    """What evaluations find: prompts differ in how hard they are, and flip to and fro by chance."""
    ease = [draw.gauss(0, 1.5) for _ in range(kind.prompts)]
    for step in range(0, STEPS + 1, kind.every):
        rates = [rate_of(kind, step, own) for own in ease]
        greedy = tuple(float(draw.random() < rate) for rate in rates)
        right = tuple(sum(draw.random() < rate for _ in range(kind.samples)) for rate in rates)
        means = tuple(count / kind.samples for count in right)
        yield (
            step,
            Evaluation(
                accuracy=wilson(sum(greedy), kind.prompts, 0.95),
                reward_mean=mean_interval(means, 0.95, SHARE),
                pass_at_k={1: mean_interval(means, 0.95, SHARE)},
                num_prompts=kind.prompts,
                num_samples=kind.samples,
                num_unscored=0,
                correct_greedy=greedy,
                mean_reward=means,
                num_right=right,
                num_scored=(kind.samples,) * kind.prompts,
            ),
        )


def rate_of(kind: Kind, step: int, ease: float = 0.0) -> float:
    """The success rate of a prompt, on the scale of logits."""
    mean = kind.first + (kind.last - kind.first) * step / STEPS
    return 1 / (1 + math.exp(-(math.log(mean / (1 - mean)) + ease)))


def step_of(kind: Kind, step: int, draw: random.Random) -> dict[str, float | None]:
    reward = sum(draw.random() < rate_of(kind, step, draw.gauss(0, 1.5)) for _ in range(256)) / 256
    return {
        "sampled_reward_mean": reward,
        "zero_std_fraction": 0.3 + draw.gauss(0, 0.05),
        "mean_group_std": 0.4 + draw.gauss(0, 0.02),
        "all_correct_fraction": 0.1,
        "all_wrong_fraction": 0.1,
        "entropy": 0.5 - 0.2 * step / STEPS + draw.gauss(0, 0.02),
        "completion_length_mean": 30 + draw.gauss(0, 1),
        "truncated_fraction": 0.01,
        "unique_fraction": 0.9,
        "grad_norm": 0.3 * math.exp(draw.gauss(0, 0.2)),
        "kl": 0.001 * step * math.exp(draw.gauss(0, 0.1)),
        "mismatch": 1e-7,
        "loss": draw.gauss(0, 0.01),
    }


def simulate(folder: Path, kind: Kind, seed: int, stop_on: Sequence[str] = ()) -> tuple[Doctor, list[str], str]:
    """Write the folder of a run while a doctor looks at it: what it said, and why it stopped it."""
    draw, said, reason = random.Random(seed), list[str](), ""
    config = Config(num_steps=STEPS, doctor=DoctorConfig(stop_on=list(stop_on)))
    config.evaluation.num_prompts = kind.prompts
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    prompts = [Prompt(f"test-{place}", "sums", str(place), {}) for place in range(kind.prompts)]
    names, ids = [name for _, name in of_prompts(prompts)], [prompt.id for prompt in prompts]
    doctor = Doctor(config, said.append)
    run: Any = SimpleNamespace(config=config, test_prompts=tuple(prompts))
    doctor.on_start(run, folder)
    looks, found = dict(looks_of(kind, draw)), list[Evaluation]()
    lines = {"metrics": list[str](), "verdicts": list[str]()}
    for step in range(STEPS + 1):
        events: list[tuple[str, dict[str, Any], Any]] = []
        if step:
            numbers = step_of(kind, step, draw)
            events.append(("train", dict(numbers), lambda n=numbers, s=step: doctor.on_step(s, n)))
        if step in looks:
            look = looks[step]
            found.append(look)
            lines["verdicts"].append(json.dumps(verdict_row(step, look, names, ids)))
            events.append(("evaluate", numbers_of(look), lambda e=look, s=step: doctor.on_evaluation(s, e)))
        try:
            for what, row, hear in events:
                lines["metrics"].append(json.dumps({"step": step, "kind": what, **row}))
                hear()
        except StopTraining as error:
            reason = str(error)
            break
    for name, of in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in of))
    facts = RunFacts(status="completed", seed=seed, steps=step, seconds=1.0, phases={})
    write_summary(folder, summary(facts, found[0], found[-1] if len(found) > 1 else None))
    return doctor, said, reason


def surfaces(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """What each says: the line of the doctor, and what came of the evaluations."""
    run, kept = read_run(folder), read_summary(folder)
    assert kept is not None
    capsys.readouterr()
    run_doctor([str(folder), "--json"])
    told = json.loads(capsys.readouterr().out)[0]["verdict"]
    run_show([str(folder), "--answers", "0"])
    shown = capsys.readouterr().out
    console = Console(width=300)
    with console.capture() as ended:
        print_summary(kept, folder, console)
    page = content([run], ["run"])["runs"][0]
    text = as_lines([run], ["run"], 300)
    words = outcome_of(kept).words
    return {
        "doctor": (told, words),
        "show": (_line(shown), words if f"; {words}\n" in shown else shown),
        "terminal": (_line(ended.get()), words if re.search(rf"; {words}\s*\n", ended.get()) else ended.get()),
        "report": (page["doctor"]["line"], page["verdict"]["badge"]),
        "text": (_line("\n".join(text)), words if text[1].endswith(f"{words.capitalize()}.") else text[1]),
    }


def _line(text: str) -> str:
    return next(line.partition("doctor: ")[2].strip() for line in text.splitlines() if "doctor: " in line)


@pytest.mark.parametrize("place", range(len(HEALTHY)))
def test_all_surfaces_say_the_same_of_a_simulated_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "run"
    simulate(folder, HEALTHY[place], place)
    found = surfaces(folder, capsys)
    assert len(set(found.values())) == 1, found
    assert verdict(read_run(folder))["state"] == outcome_of(read_summary(folder) or {}).state


SICK = Kind(0.6, 0.25, 256, 20)


@pytest.mark.parametrize("kind", [*HEALTHY[:3], SICK])
def test_rules_see_the_same_while_a_run_trains_and_afterwards(tmp_path: Path, kind: Kind) -> None:
    folder = tmp_path / "run"
    doctor, said, _ = simulate(folder, kind, 3)
    log = run_log(read_run(folder))
    live = {one.rule.id: one.title for one in diagnose(doctor._log)}
    # What needs the end of a run, its files of answers or a control is said afterwards
    after = {one.rule.id: one.title for one in diagnose(replace(log, summary=doctor._log.summary))}
    assert live == after
    assert [line for line in said if line.startswith("doctor, sick")] == [] or kind is SICK


def test_a_run_stopped_as_critical_stays_critical_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, said, reason = simulate(tmp_path / "run", SICK, 1, ["sick"])
    assert reason.startswith("doctor.stop_on has ")
    named = {line.split()[2] for line in said if line.startswith("doctor, sick")}
    health = health_of(read_run(tmp_path / "run"))
    assert health.line.startswith("sick: ")
    assert named <= {one.rule.id for one in health.findings if one.level is Level.SICK}
    assert all(line == health.line for line, _ in surfaces(tmp_path / "run", capsys).values())


def no_run_is_sick(folder: Path, seeds: range) -> None:
    told = []
    for seed in seeds:
        kind = HEALTHY[seed % len(HEALTHY)]
        _, said, reason = simulate(folder / str(seed), kind, seed, ["sick"])
        told += [(seed, line) for line in (*said, reason) if line.startswith(("doctor, sick", "doctor.stop_on"))]
        health = health_of(read_run(folder / str(seed)))
        told += [(seed, one.title) for one in health.findings if one.level is Level.SICK]
    assert told == []


def test_no_simulated_healthy_run_is_critical_at_any_look(tmp_path: Path) -> None:
    no_run_is_sick(tmp_path, range(14))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_none_of_200_simulated_healthy_runs_is_critical_at_any_look(tmp_path: Path) -> None:
    no_run_is_sick(tmp_path, range(14, 214))


def test_verdicts_of_all_prompts_are_kept_when_few_answers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    config = small_config(num_steps=2, preflight__enabled=False, evaluation__every=1, evaluation__num_prompts=3)
    config.output.answers_per_evaluation = 1
    train(config, tmp_path)
    kept, looks = with_prompts(rows(tmp_path / "verdicts.jsonl")), rows(tmp_path / "metrics.jsonl", "evaluate")
    assert [row["step"] for row in kept] == [0, 1, 2]
    assert "prompts" not in rows(tmp_path / "verdicts.jsonl")[1]  # said once
    for row, look in zip(kept, looks, strict=True):
        assert len(row["prompts"]) == len(row["ids"]) == len(row["right"]) == 3
        assert row["right"].count("1") / 3 == pytest.approx(look["accuracy"])
        assert sum(row["rewards"]) / 3 == pytest.approx(look["reward_mean"], abs=1e-5)
    assert len({row["prompt_id"] for row in rows(tmp_path / "evaluations.jsonl")}) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_the_demonstration_ends_with_a_gain_and_a_healthy_run(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the README has it, on one thread: what the terminal ends with is what all others say."""
    words = ["train", "recipe=arithmetic", f"seed={seed}", f"hydra.run.dir={tmp_path / 'run'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    done = subprocess.run([sys.executable, "-m", "covey", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "doctor, sick" not in done.stdout
    ended = done.stdout.partition("512 held-out prompts, greedy")[2]
    assert ended.splitlines()[0].endswith("; gain shown")
    assert _line(ended).startswith("healthy")
    monkeypatch.setenv("COLUMNS", "300")
    found = surfaces(tmp_path / "run", capsys)
    assert set(found.values()) == {(_line(ended), "gain shown")}


@pytest.mark.parametrize(
    ("num_prompts", "sign", "said"),
    [
        (19, True, "+0.5, too few to tell"),
        (20, True, "+0.5 [0.1, 0.9]"),
        (19, False, "0.5 [0.1, 0.9]"),
        (1, False, "0.5"),
    ],
)
def test_a_change_of_few_prompts_is_said_to_be_one(num_prompts: int, sign: bool, said: str) -> None:
    estimate = {"value": 0.5, "low": 0.1, "high": 0.9}
    assert _cell(estimate, str, {"num_prompts": num_prompts}, sign=sign) == said
