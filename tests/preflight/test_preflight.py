"""What the preflight refuses of a policy: an engine that samples something else, a layout that leaks."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from covey.environments.arithmetic import Arithmetic
from covey.policy.attention.packed import StreamSegment
from covey.trainer.layouts import LAYOUTS, Part, Stream, make_layout, whole_layout
from covey.trainer.trainer import Trainer
from covey_preflight.policy import entries
from covey_preflight.preflight import _agree, _as_computed, raise_on_failure, run_checks
from covey_preflight.subject import Check

from ..support.builders import saved_model
from .looked_at import Build, finding, refusal, subjects, use_engine


@pytest.fixture(name="build")
def _build() -> Iterator[Build]:
    with subjects() as build:
        yield build


# ------------------------------------------------------------------------------------------------ a sound run


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling__temperature": 0.7, "sampling__top_p": 0.9, "sampling__top_k": 20},
        {"model__lora_rank": 2, "model__lora_dropout": 0.5},
        {"model__gradient_checkpointing": True, "algorithm__kl_coef": 0.1, "updates_per_batch": 2},
        {"algorithm__high_entropy_fraction": 0.3, "packing": "padded", "micro_batch_tokens": 20, "logprob_chunk": 5},
        {"model__precision": "bfloat16"},
        {"model__precision": "float16"},
        {"engine__name": "fake"},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_a_sound_run_passes_every_check(build: Build, changes: dict[str, Any]) -> None:
    checks = run_checks(build(Arithmetic(levels=[1]), **changes))
    assert [check.name for check in checks] == [
        *("tokenizer", "lengths", "gold answers", "wrong answers", "memory", "completions"),
        *("log-probs", "transformers", "gradient", "true gradient"),
    ]
    assert [(check.name, check.figure) for check in checks if not check.passed] == []
    assert not any(check.remedy for check in checks)
    raise_on_failure(checks)


@pytest.mark.long
def test_in_float32_engine_and_trainer_agree_to_a_millionth_and_so_do_the_layouts(build: Build) -> None:
    subject = build(sampling__max_tokens=32)
    logprobs, gradient = finding(subject, "log-probs"), finding(subject, "gradient")
    assert logprobs.values["max"] < 1e-5
    assert logprobs.tolerance == "0.0001 nats at most, 1e-05 on average"
    assert max(gradient.values.values()) < 5e-6
    assert gradient.tolerance == "1e-05"
    assert len(gradient.values) == 6


@pytest.mark.long
def test_an_architecture_of_float64_arithmetic_is_held_to_float64(build: Build, tmp_path: Path) -> None:
    gpt2 = saved_model(tmp_path, "gpt2", n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    found = finding(build(model__name=gpt2, model__precision="float64"), "gradient")
    assert found.tolerance == "1e-09"
    assert found.passed
    assert finding(build(model__precision="float64"), "gradient").tolerance == "1e-05"


def test_tolerances_and_the_number_of_prompts_are_settings(build: Build) -> None:
    strict = build(preflight__logprob_tolerance=1e-12, preflight__gradient_tolerance=1e-14, preflight__num_prompts=3)
    assert len(strict.prompts) == 3
    assert not finding(strict, "log-probs").passed
    assert finding(strict, "log-probs").tolerance.startswith("1e-12 nats")
    assert not finding(strict, "gradient").passed
    short = build(sampling__max_tokens=20, preflight__max_tokens=3)
    assert max(rollout.num_loss_tokens for group in short.groups for rollout in group.rollouts) == 3


def test_preflight_checks_the_groups_of_the_first_step(build: Build) -> None:
    subject = build(preflight__num_prompts=2, groups_per_step=2)
    looked_at = [(group.prompt.id, group.rollouts[0].target_ids) for group in subject.groups]
    trained = [(group.prompt.id, group.rollouts[0].target_ids) for group in subject.run.source.take(2)]
    assert looked_at == trained


# ------------------------------------------------------------------------------------------------ engine and layout


@pytest.mark.long
def test_an_engine_off_by_a_hundredth_of_a_nat_is_refused_with_the_figure(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_engine(monkeypatch, spoil=lambda c: replace(c, logprobs=tuple(p + 0.01 for p in c.logprobs)))
    line = refusal(build())
    assert line.startswith("preflight: log-probs: engine and trainer differ by 0.01 nats at most, 0.01 on average of ")
    assert "allowed: 0.0001 nats at most" in line
    assert "preflight.logprob_tolerance accepts" in line
    assert line.endswith("(preflight.enabled=false trains unchecked)")
    assert "\n" not in line
    assert finding(build(preflight__logprob_tolerance=0.2), "log-probs").passed


def test_the_worst_token_is_named_by_its_prompt(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = build()
    name = subject.prompts[1].id
    group = subject.groups[1]
    spoilt = replace(group.rollouts[0], sampler_logprobs=tuple(p - 1 for p in group.rollouts[0].sampler_logprobs))
    subject.groups[1] = replace(group, rollouts=(spoilt, *group.rollouts[1:]))
    assert f"most in prompt {name}" in finding(subject, "log-probs").figure


def test_an_engine_that_samples_from_another_distribution_is_refused(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_engine(monkeypatch, sampling=lambda s: replace(s, temperature=1.0))
    subject = build(sampling__temperature=0.9, model__precision="bfloat16", sampling__max_tokens=32)
    found = finding(subject, "log-probs")
    assert found.values["max"] < 0.5  # no token alone tells it from bfloat16, their mean does
    assert not found.passed


@pytest.mark.long
def test_log_probs_that_are_not_finite_are_refused_by_the_prompt(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([math.nan])
    use_engine(monkeypatch, spoil=lambda c: replace(c, logprobs=(next(calls, c.logprobs[0]), *c.logprobs[1:])))
    subject = build()
    assert refusal(subject).startswith(f"preflight: completions: prompt {subject.prompts[0].id}: the engine sampled ")


@pytest.mark.long
def test_a_layout_that_lets_rollouts_see_each_other_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(part: Part) -> Stream:
        stream = whole_layout(part)
        walls = (StreamSegment(0, len(stream.input_ids[0])),)
        return replace(stream, layout=partial(make_layout, walls))

    monkeypatch.setitem(LAYOUTS, "packed", leaking)
    subject = build()
    found = finding(subject, "gradient")
    assert max(error for name, error in found.values.items() if "packed" in name) > 0.01
    assert max(error for name, error in found.values.items() if "packed" not in name) < 5e-6
    assert "most with packing=packed" in refusal(subject)


def test_a_denominator_that_is_counted_by_micro_batch_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Trainer._backward

    def wrong(self: Trainer, part: Any, batch: Any, statistics: Any) -> Any:
        return right(self, part, replace(batch, num_loss_tokens=len(part.batch.target_L)), statistics)

    monkeypatch.setattr(Trainer, "_backward", wrong)
    assert min(finding(build(), "gradient").values.values()) > 0.1


def test_no_gradient_at_all_is_refused(build: Build) -> None:
    everything = {"algorithm__rejection": "token_k1", "algorithm__rejection_thresholds": "5_6"}
    found = finding(build(**everything), "gradient")
    assert found.figure.startswith("the gradient is 0 or not finite with packing=")
    assert not found.passed


# ------------------------------------------------------------------------------------------------ the whole


def test_what_builds_on_a_failed_check_is_not_measured(build: Build) -> None:
    checks = {check.name: check for check in run_checks(build(engine__cache_bytes=512))}
    assert checks["log-probs"].figure == "not measured before lengths passes"
    assert not checks["log-probs"].passed
    assert checks["gold answers"].passed


def test_the_first_failure_of_any_rank_is_that_of_all() -> None:
    good, bad = (Check(passed, "", "", name="memory") for passed in (True, False))
    assert _agree([good, bad]) is bad
    assert _agree([good, good]) is good


def test_a_gradient_is_compared_on_all_trained_weights(build: Build) -> None:
    model = build(model__lora_rank=2).run.policy.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(piece.numel() for piece in entries(model)) == trained


def test_what_is_computed_in_another_precision_is_judged_by_that_one(build: Build) -> None:
    assert _as_computed(build(model__precision="float16")).config.model.precision in ("bfloat16", "float32")
    assert _as_computed(build()).config.model.precision == "float32"
