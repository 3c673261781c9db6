"""NaN, infinity, extreme groups and too little memory: no weight changes by them, and the run says what it met."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from covey.algorithm.aggregation import AGGREGATIONS
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.losses import LOSS_FUNCTIONS, LOSSES
from covey.algorithm.settings import AlgorithmConfig
from covey.engine.base import EngineStats
from covey.loop import train
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import Sampler
from covey.run import build
from covey.run.build import build_run
from covey.run.checkpoints.checkpoint import STATE
from covey.run.folder import read_summary
from covey.system.waits.timer import PhaseTimer
from covey.trainer.prepare import make_training_batches
from covey.types import Completion, Group, Prompt, RunStopped, Sampling
from tests.support.builders import credit_assigner

from ...support.small import (
    POLICIES,
    TOKENIZER,
    equal,
    group,
    rollout,
    rows,
    scripted,
    scripted_for,
    small_config,
    timeless,
    use,
    varied,
)
from ..runs import SETTINGS, fingerprint, finish, finish_well, resume, saved_step, start

BAD_STEP, NUM_STEPS = 3, 6
ROLLOUTS_PER_STEP = 8


# -------------------------------------------------------------------------------------------- NaN and infinity in a run


@dataclass
class Poison:
    """Makes numbers bad in the update of chosen steps, which it tells by the rollouts it was asked to score."""

    kind: str
    bad_steps: Sequence[int]
    num_scored: int = 0

    def verdict(self, prompt: Prompt, text: str) -> float:
        self.num_scored += prompt.id.startswith("train")
        return varied(prompt, text)

    @property
    def is_active(self) -> bool:
        return self.num_scored in [(step + 1) * ROLLOUTS_PER_STEP for step in self.bad_steps]

    def into(self, policy: Policy) -> Policy:
        """The policy, poisoned where it is trained."""
        value = math.inf if self.kind.startswith("inf") else math.nan
        if self.kind.endswith("logits"):
            policy.causal_lm.base_model.register_forward_hook(lambda module, given, out: self.spoil(out, value))
        if self.kind.endswith("gradient"):
            parameter = next(p for p in policy.model.parameters() if p.dim() > 1)
            parameter.register_hook(lambda gradient: spoilt(gradient, value) if self.is_active else None)
        return policy

    def spoil(self, out: BaseModelOutput, value: float) -> None:
        """What logits are made of, in passes that train; sampling goes through the same model, without gradients."""
        if torch.is_grad_enabled() and self.is_active:
            assert out.last_hidden_state is not None
            out.last_hidden_state = spoilt(out.last_hidden_state, value)

    def loss(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The loss, which becomes NaN where this poison is one of losses."""

        def poisoned(*arguments: Any, **options: Any) -> Tensor:
            found = original(*arguments, **options)
            return spoilt(found, math.nan) if self.kind == "nan loss" and self.is_active else found

        return poisoned


def spoilt(values: Tensor, value: float) -> Tensor:
    """The tensor with its first row, or element, bad."""
    bad = values.clone()
    bad[0] = value
    return bad


def poisoned_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, poison: Poison, policy: str = "causal", **settings: Any
) -> None:
    """A run of six steps with a checkpoint after each, in this process."""

    def load(config: ModelConfig, *, seed: int, on_host: bool = False) -> Policy:
        return poison.into(load_policy(config, seed=seed, on_host=on_host))

    kept = {"output__save_every": 1, "output__keep_last": 100, "preflight__enabled": False}
    config = small_config(num_steps=NUM_STEPS, **kept, **POLICIES[policy], **settings)
    folder.mkdir(exist_ok=True)
    with monkeypatch.context() as patches:
        patches.setattr(build, "load_policy", load)
        patches.setitem(LOSS_FUNCTIONS, "clip", poison.loss(LOSS_FUNCTIONS["clip"]))
        use(patches, scripted_for(policy, poison.verdict))
        train(config, folder)


def checkpoint_of(folder: Path, step: int, policy: str = "causal") -> tuple[dict[str, Tensor], Any]:
    """Weights and what the optimiser holds of them after so many steps."""
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    weights = load_policy(ModelConfig(name=str(checkpoint / "policy"), kind=policy), seed=0).model.state_dict()
    return weights, torch.load(checkpoint / STATE, weights_only=True)["trainer"]["optimizer"]["state"]


def same_moments(first: Any, second: Any) -> bool:
    return all(torch.equal(first[i][name], second[i][name]) for i in second for name in second[i]) and len(
        first
    ) == len(second)


KINDS = ("nan logits", "inf logits", "nan loss", "nan gradient", "inf gradient")
OF_BOTH = pytest.mark.parametrize(
    ("kind", "policy"), [*((kind, "causal") for kind in KINDS), ("nan logits", "masked"), ("inf gradient", "masked")]
)


@pytest.mark.long
@OF_BOTH
def test_a_bad_number_acts_like_a_step_without_signal(
    kind: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_run(tmp_path / "bad", monkeypatch, Poison(kind, [BAD_STEP]), policy)
    before, after = (checkpoint_of(tmp_path / "bad", step, policy) for step in (BAD_STEP, BAD_STEP + 1))
    assert equal(before[0], after[0])
    assert same_moments(before[1], after[1])
    skipped = [row["skipped"] for row in rows(tmp_path / "bad" / "metrics.jsonl", "train")]
    assert skipped == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    found = read_summary(tmp_path / "bad")
    assert found is not None
    assert found["skipped_steps"] == 1

    class Flat(Poison):
        """All rewards of the bad step are equal, which teaches nothing either."""

        def verdict(self, prompt: Prompt, text: str) -> float:
            reward = super().verdict(prompt, text)
            return 0.5 if (self.num_scored - 1) // ROLLOUTS_PER_STEP == BAD_STEP else reward

    poisoned_run(tmp_path / "flat", monkeypatch, Flat("none", []), policy)
    ends = [checkpoint_of(tmp_path / name, NUM_STEPS, policy)[0] for name in ("bad", "flat")]
    assert equal(*ends)
    bad, flat = (timeless(rows(tmp_path / name / "metrics.jsonl", "train")) for name in ("bad", "flat"))
    assert bad[:BAD_STEP] == flat[:BAD_STEP]
    assert bad[BAD_STEP + 1 :] == flat[BAD_STEP + 1 :]


@pytest.mark.long
@OF_BOTH
def test_repeated_bad_numbers_stop_the_run_with_the_last_good_weights(
    kind: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = r"^loss or gradient was not finite 2 times in a row \(optimizer.max_nonfinite_steps\); prompts .*: train-\d"
    with pytest.raises(RunStopped, match=line):
        poisoned_run(tmp_path, monkeypatch, Poison(kind, range(3, 6)), policy, optimizer__max_nonfinite_steps=2)
    assert equal(*(checkpoint_of(tmp_path, step, policy)[0] for step in (3, 4)))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-000004"


class Sloppy:
    """An engine whose second completion has log-probs that are no numbers."""

    version = 0

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        return [Completion((9, 1), (-0.5, math.nan if i == 1 else -0.1), "stop", 0) for i in range(n)]

    def load_weights(self, version: int) -> None: ...

    def take_stats(self) -> EngineStats:
        return EngineStats()


def test_a_completion_from_nonfinite_logits_is_a_failure_of_its_own() -> None:
    sampler = Sampler(Sloppy(), scripted(), TOKENIZER)
    found = asyncio.run(roll_out(sampler, Prompt("p", "scripted", "a:", {}), 3, Sampling()))
    assert len(found.rollouts) == 2
    assert [failure.reason for failure in found.failures] == ["the engine sampled with log-probs that are not finite"]


# ------------------------------------------------------------------------------------------------------ extreme groups


def lengths(*num_tokens: int, reason: str = "stop") -> Group:
    """Rollouts of these lengths that all earn something else."""
    rollouts = tuple(rollout(float(i), n, reason) for i, n in enumerate(num_tokens))
    return Group(Prompt("p", "test", "?", {}), rollouts, ())


EXTREME: dict[str, Group] = {
    "all rewards equal": group(0.5, 0.5, 0.5, 0.5),
    "all rewards 0": group(0.0, 0.0, 0.0, 0.0),
    "one sample": group(1.0, num_failures=3),
    "an empty completion": lengths(0, 3, 2, 4),
    "only empty completions": lengths(0, 0, 0, 0),
    "all truncated": lengths(4, 4, 4, 4, reason="length"),
}
ABSOLUTE = {"none", "reinforce_plus_plus", "role_ema"}
"""Advantages that are not relative to the group: a group of equal rewards may teach by them."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("advantage", list(ADVANTAGES))
@pytest.mark.parametrize("name", list(EXTREME))
def test_an_extreme_group_has_finite_advantages(name: str, advantage: str) -> None:
    options = {"k": 2} if advantage in ("passk", "pkpo") else {}
    assigner = credit_assigner(AlgorithmConfig(advantage=advantage, advantage_options=options), {"value": 1.0})
    (found,) = assigner.assign([EXTREME[name]], None).advantages
    assert len(found) == len(EXTREME[name].rollouts)
    assert all(map(math.isfinite, found))
    if advantage not in ABSOLUTE and len(set(EXTREME[name].rewards)) < 2:
        assert found == [0.0] * len(found)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(EXTREME))
@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("loss", list(LOSSES))
def test_an_extreme_group_gives_a_finite_update_and_without_signal_none(
    loss: str, mask_truncated: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"beta": 1.0} if loss == "dro" else {}
    chosen = {"loss": loss, "loss_options": options, "mask_truncated": mask_truncated}
    metrics, changed = update(monkeypatch, [EXTREME[name]], **chosen)
    assert all(map(math.isfinite, metrics.values())), metrics
    assert metrics["skipped"] == 0
    silent = len(set(EXTREME[name].rewards)) < 2 or (name == "all truncated" and mask_truncated)
    if name == "only empty completions" or (silent and LOSSES[loss].proportional):
        assert not changed


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_all_extreme_groups_of_a_step_at_once_give_a_finite_update(
    aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, changed = update(monkeypatch, list(EXTREME.values()), aggregation=aggregation)
    assert all(map(math.isfinite, metrics.values())), metrics
    assert changed


def update(monkeypatch: pytest.MonkeyPatch, groups: list[Group], **algorithm: Any) -> tuple[dict[str, float], bool]:
    """Metrics of one step on these groups, and whether it changed a weight."""
    use(monkeypatch, scripted())
    config = small_config(**{f"algorithm__{key}": value for key, value in algorithm.items()})
    run = build_run(config, scripted(), PhaseTimer())
    before = {name: tensor.clone() for name, tensor in run.policy.model.state_dict().items()}
    try:
        (batch,), _ = make_training_batches(groups, run.trainer, run.credit, run.packing, 0)
        metrics = run.trainer.step(batch, 0)
        return metrics, not equal(dict(run.policy.model.state_dict()), before)
    finally:
        run.close()


# ------------------------------------------------------------------------------------------------------ out of memory

HUNGRY = """
import os, torch
from covey.algorithm.losses import LOSSES

CALLS = [0]

def clip(*arguments, **options):
    CALLS[0] += 1
    if CALLS[0] == int(os.environ.get("HUNGRY_AT", "0")):
        torch.empty(1 << 50)
    return LOSSES["clip"].function(*arguments, **options)
"""


@pytest.mark.slow
def test_too_little_memory_is_one_line_with_settings_and_the_run_resumes(
    reference: Path,
) -> None:
    (reference / "hungry_loss.py").write_text(HUNGRY)
    words = (*SETTINGS, "algorithm.loss=hungry_loss:clip", "preflight.enabled=false")
    finish_well(start(reference, *words, "hydra.run.dir=fed"))
    status, output = finish(start(reference, *words, "hydra.run.dir=hungry", environment={"HUNGRY_AT": 20}))
    assert status == 2
    (line,) = [line for line in output.splitlines() if line.startswith("covey: ")]
    assert line.startswith("covey: out of memory (")
    assert "lower micro_batch_tokens, logprob_chunk or engine.cache_bytes, or set model.gradient_checkpointing" in line
    assert "Traceback" not in output
    assert 0 < saved_step(reference / "hungry") < 40
    finish_well(resume(reference, "hungry"))
    assert fingerprint(reference / "hungry") == fingerprint(reference / "fed")
