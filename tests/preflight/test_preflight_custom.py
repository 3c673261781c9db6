"""What a dry run says of custom functions: each mistake in one line that names the setting and the place."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config.schema import Config
from covey.types import Prompt
from covey_preflight.custom import try_custom

from ..support.small import logging_as_it_was, rows, small_config, words

PROMPTS = [Prompt(f"train-{n}", "test", f"{n}+1=", {"answer": n + 1}) for n in range(3)]
HEADER = "import math\nimport torch\nfrom covey.algorithm.credit.selection import Selected\n\n\n"
"""Of every module below: a function begins on line 6."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, from which modules are imported; they are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mine", None)  # of another file's tests
    yield tmp_path
    sys.modules.pop("mine", None)


def write(folder: Path, source: str) -> None:
    (folder / "mine.py").write_text(HEADER + source)
    importlib.invalidate_caches()


def settings_for(setting: str) -> dict[str, Any]:
    """The setting with the function mine:f, in the form that it takes."""
    return {f"algorithm__{setting}": {"mine:f": {}} if setting == "shaping" else "mine:f"}


RIGHT = {
    "advantage": "def f(scores, *, scale=1.0):\n    return scale * scores.rewards_N",
    "advantage that reads answers": (
        "def f(scores, answers):\n"
        "    return torch.tensor([float(a.prompt.columns['answer'] + len(a.text)) for a in answers])"
    ),
    "advantage that logs": "def f(scores):\n    return scores.rewards_N, {'scored': scores.scored.sum()}",
    "shaping": "def f(rewards_N, info, *, price=0.1):\n    return rewards_N - price * info.lengths_N",
    "selection": (
        "def f(scores, estimator):\n"
        "    keep_N = scores.scored & (scores.rewards_N != 0.5)\n"
        "    return Selected(keep_N, torch.where(keep_N, estimator(scores), 0.0))"
    ),
    "group_filter": "def f(rewards_M):\n    return rewards_M.isfinite().all()",
    "group_filter in NumPy": "def f(rewards_M):\n    return rewards_M.numpy().std() > 0",
    "loss": "def f(inputs):\n    return -inputs.ratio.clamp(max=2) * inputs.advantages_NT",
    "loss that logs": "def f(inputs):\n    return -inputs.ratio * inputs.advantages_NT, {'far': inputs.ratio > 2}",
    "kl_estimator": "def f(q_NT, clamp):\n    return q_NT.abs()",
    "aggregation": "def f(counts_N, denominators):\n    return counts_N.clamp(min=1) ** -0.5 / denominators.sequences",
    "kl_aggregation": "def f(counts_N, denominators):\n    return torch.ones_like(counts_N) / denominators.tokens",
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_function_that_is_right_passes(kind: str, folder: Path) -> None:
    write(folder, RIGHT[kind])
    assert try_custom(small_config(**settings_for(kind.split()[0])), PROMPTS) == ["mine:f"]


def test_without_custom_functions_there_is_nothing_to_try() -> None:
    assert try_custom(Config(), PROMPTS) == []


ROLLOUT = "return one number for each rollout, a tensor of shape (12,)"
TOKEN = "return one number for each token, a tensor of shape (4, 5)"
FREE = "the update must not depend on micro-batches, got another"
NO_GRADIENT = "must depend on inputs.log_probs_NT, whose gradient trains, got a tensor without that gradient"
WRONG = [
    ("advantage", "def f(scores):\n    return scores.rewards_N[1:]", f"must {ROLLOUT}, got shape (11,) (mine.py:6)"),
    ("advantage", "def f(scores):\n    return scores.rewards_N.tolist()", f"must {ROLLOUT}, got a list (mine.py:6)"),
    (
        "advantage",
        "def f(scores, answers, length):\n    return scores.rewards_N",
        "must take (scores) or (scores, answers), got missing a required argument: 'answers' (mine.py:6)",
    ),
    (
        "advantage",
        "def f(scores):\n    x = 1\n    return scores.words",
        "raised AttributeError: 'Scores' object has no attribute 'words' (mine.py:8)",
    ),
    (
        "advantage",
        "def f(scores):\n    return torch.cat([r / r[0] for r in scores.rewards_N.split(4)])",
        "must return finite numbers, got nan for a reward of 0 (mine.py:6)",
    ),
    (
        "advantage",
        "def f(scores):\n    r = scores.rewards_N\n    return (r - r.mean()) / r.std()",
        "must return finite numbers, got nan for a reward of 0.5 (mine.py:6), where a completion was not scored (NaN)",
    ),
    (
        "advantage",
        "def f(scores):\n    return torch.cat([r / (r.max() - r.min()) for r in scores.rewards_N.split(4)])",
        "must return finite numbers, got inf for a reward of 0.5 (mine.py:6), where the rewards of a group are equal",
    ),
    (
        "shaping",
        "def f(rewards_N, scores):\n    return rewards_N.log()",
        "must return finite numbers, got -inf for a reward of 0 (mine.py:6)",
    ),
    (
        "shaping",
        "def f(rewards_N):\n    return rewards_N",
        "must take (rewards_N, scores), got too many positional arguments (mine.py:6)",
    ),
    (
        "selection",
        "def f(scores, estimator):\n    return scores.scored",
        "must return covey.algorithm.credit.selection.Selected, keep_N one bool for each rollout, shape (12,), got "
        "tens",
    ),
    (
        "group_filter",
        "def f(rewards_M):\n    return rewards_M > 0",
        "must return True or False, got tensor([False,  True,  True]) (mine.py:6)",
    ),
    (
        "group_filter",
        "def f(rewards_M):\n    return rewards_M.min() < 1 or None",
        "must return True or False, got None (mine.py:6)",
    ),
    ("group_filter", "def f(rewards_M):\n    return None", "must return True or False, got None (mine.py:6)"),
    (
        "loss",
        "def f(inputs):\n    return (inputs.ratio * inputs.advantages_NT).mean()",
        f"must {TOKEN}, got shape () (mine.py:6)",
    ),
    ("loss", "def f(inputs):\n    return 1.0", f"must {TOKEN}, got a float (mine.py:6)"),
    (
        "loss",
        "def f(inputs):\n    return torch.zeros(inputs.mask_NT.shape, requires_grad=True)",
        f"{NO_GRADIENT} (mine.py:6)",
    ),
    ("loss", "def f(inputs):\n    return -inputs.ratio.detach() * inputs.advantages_NT", f"{NO_GRADIENT} (mine.py:6)"),
    (
        "loss",
        "def f(inputs):\n    return (inputs.ratio - inputs.ratio.detach()).sqrt()",
        "must return finite numbers, got inf for a log-prob of ",
    ),
    (
        "loss",
        "def f(inputs):\n    return -inputs.ratio * inputs.advantages_NT / inputs.mask_NT.sum()",
        f"must keep rollouts apart: {FREE} loss where fewer are beside one (mine.py:6)",
    ),
    (
        "loss",
        "def f(inputs):\n    return -inputs.ratio * inputs.advantages_NT.mean(1, keepdim=True)",
        f"must keep tokens outside of inputs.mask_NT out: {FREE} loss where there is more padding (mine.py:6)",
    ),
    (
        "loss",
        "def f(inputs):\n    return inputs.log_probs_NT.view(7, -1)",
        "raised RuntimeError: shape '[7, -1]' is invalid for input of size 20 (mine.py:7)",
    ),
    (
        "kl_estimator",
        "def f(q_NT):\n    return q_NT",
        "must take (q_NT, clamp), got too many positional arguments (mine.py:6)",
    ),
    (
        "kl_estimator",
        "def f(q_NT, clamp):\n    return q_NT.mean()",
        "must return one number for each token, a tensor of shape (3, 4), got shape () (mine.py:6)",
    ),
    (
        "kl_estimator",
        "def f(q_NT, clamp):\n    return q_NT.log()",
        "must return finite numbers, got nan for a log-ratio of -2 (mine.py:6)",
    ),
    (
        "kl_estimator",
        "def f(q_NT, clamp):\n    return q_NT - q_NT.mean()",
        "must take each token alone, got another value where fewer are beside it (mine.py:6)",
    ),
    (
        "aggregation",
        "def f(counts_N, denominators):\n    return counts_N / counts_N.sum()",
        f"must divide by denominators alone: {FREE} weight where fewer rollouts are beside one (mine.py:6)",
    ),
    (
        "aggregation",
        "def f(counts_N, denominators):\n    return 1 / counts_N",
        "must return finite numbers, got inf for a number of loss tokens of 0 (mine.py:6)",
    ),
]


@pytest.mark.parametrize(("setting", "source", "said"), WRONG)
def test_a_mistake_is_one_line_that_names_setting_function_and_place(
    setting: str, source: str, said: str, folder: Path
) -> None:
    write(folder, source)
    with pytest.raises(ValueError) as caught:
        try_custom(small_config(**settings_for(setting)), PROMPTS)
    assert str(caught.value).startswith(f"algorithm.{setting}=mine:f {said}")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ through a run


def run(*more: str) -> int:
    with logging_as_it_was():
        return main(["train", *words(), "output.progress=false", "hydra.run.dir=run", *more])


@pytest.mark.long
def test_a_mistake_ends_a_run_before_anything_is_sampled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "def f(scores):\n    return scores.rewards_N.tolist()")
    assert run("algorithm.advantage=mine:f") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "covey: preflight: custom functions: algorithm.advantage=mine:f must return one number for each rollout, a "
        "tensor of shape (12,), got a list (mine.py:6); fix the function (preflight.enabled=false trains unchecked)"
    )
    assert not (folder / "run" / "metrics.jsonl").read_text()


def test_without_the_preflight_the_first_step_says_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "def f(scores):\n    return scores.rewards_N[1:]")
    assert run("algorithm.advantage=mine:f", "preflight.enabled=false") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "covey: algorithm.advantage=mine:f must return one number for each rollout, a tensor of shape (8,), got shape "
        "(7,) (mine.py:6)"
    )


CUT_OFF = {
    "a detached ratio": "-inputs.ratio.detach() * inputs.advantages_NT",
    "numbers of its own": "torch.zeros(inputs.mask_NT.shape)",
    "data": "inputs.old_log_probs_NT * inputs.advantages_NT",
}


@pytest.mark.parametrize("preflight", ["true", "false"])
@pytest.mark.parametrize("source", CUT_OFF)
def test_a_custom_loss_without_gradient_is_one_line_with_or_without_preflight(
    source: str, preflight: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, f"def f(inputs):\n    return {CUT_OFF[source]}")
    assert run("algorithm.loss=mine:f", f"preflight.enabled={preflight}") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"algorithm.loss=mine:f {NO_GRADIENT} (mine.py:6)" in said


def test_a_kl_estimator_that_is_differentiated_must_have_a_gradient(folder: Path) -> None:
    write(folder, "def f(q_NT, clamp):\n    return q_NT.detach() ** 2")
    chosen = {"algorithm__kl_coef": 0.1, "algorithm__kl_estimator": "mine:f"}
    assert try_custom(small_config(**chosen), PROMPTS) == ["mine:f"]
    with pytest.raises(ValueError, match=r"must depend on q_NT for kl_gradient=naive, got a tensor without that"):
        try_custom(small_config(**chosen, algorithm__kl_gradient="naive"), PROMPTS)


@pytest.mark.long
def test_a_mistyped_option_and_a_module_that_cannot_be_imported_are_said_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, "def f(scores, *, scale=1.0):\n    return scores.rewards_N")
    assert run("algorithm.advantage=mine:f", "algorithm.advantage_options.scal=2") == 2
    assert "algorithm.advantage_options must be among scale for f, got scal" in capsys.readouterr().err
    assert run("algorithm.advantage=mine:g") == 2
    assert "module mine must define the function g (mine:g)" in capsys.readouterr().err
    sys.modules.pop("mine")
    write(folder, "x = y")
    assert run("algorithm.advantage=mine:f") == 2
    assert "mine:f needs module mine, whose import raised NameError: name 'y' is not defined (mine.py:6)" in (
        capsys.readouterr().err
    )


@pytest.mark.long
def test_every_custom_function_trains_and_what_it_logs_is_in_the_metrics(folder: Path) -> None:
    source = "\n".join(
        RIGHT[kind].replace("def f(", f"def {kind.split()[0]}(")
        for kind in ("advantage that reads answers", "shaping", "selection", "group_filter", "kl_estimator")
    )
    source += """
def loss(inputs, *, cap):
    ratio_NT = inputs.ratio.clamp(max=cap)
    return -ratio_NT * inputs.advantages_NT, {"capped": inputs.ratio > cap, "two": torch.full_like(ratio_NT, 2.0)}

def weigh(counts_N, denominators):
    return torch.ones_like(counts_N) / denominators.length / denominators.sequences
"""
    source = source.replace("for a in answers])", "for a in answers]), {'answers': len(answers)}")
    write(folder, source)
    names = {kind: f"mine:{kind}" for kind in ("advantage", "selection", "group_filter", "loss", "kl_estimator")}
    settings = [f"algorithm.{setting}={name}" for setting, name in names.items()]
    settings += ["algorithm.loss_options.cap=1.5", "algorithm.aggregation=mine:weigh", "algorithm.kl_coef=0.01"]
    settings += ["algorithm.shaping={mine\\:shaping: {price: 0.2}}", "algorithm.norm_length=10"]
    assert run(*settings) == 0
    (*_, row) = rows(folder / "run" / "metrics.jsonl", "train")
    assert row["advantage/answers"] == 8
    assert row["loss/two"] == pytest.approx(2.0)
    assert row["loss/capped"] == 0.0
    (check, *_) = json.loads((folder / "run" / "preflight.json").read_text())
    assert check["name"] == "custom functions"
    assert check["figure"] == (
        "mine:shaping, mine:advantage, mine:selection, mine:group_filter, mine:loss, mine:kl_estimator, mine:weigh "
        "tried on made-up inputs"
    )
