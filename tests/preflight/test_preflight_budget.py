"""How much a check looks at where passes take long: less, never nothing, and it says how much."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.environments.arithmetic import Arithmetic
from covey.types import Group, Prompt, Reward, Rollout
from covey_preflight.budget import affordable_tokens, begin_with_text, shorten_groups, tokens_of
from covey_preflight.policy import first_groups
from covey_preflight.preflight import run_checks
from covey_preflight.slope import _relative_error

from .looked_at import Build, finding, slow, subjects

LONG: dict[str, Any] = {"sampling__max_tokens": 60}


@pytest.fixture(name="build")
def _build() -> Iterator[Build]:
    with subjects() as build:
        yield build


def rollout(num_prompt: int, num_completion: int) -> Rollout:
    length = num_prompt + num_completion - 1
    mask = tuple(place >= num_prompt - 1 for place in range(length))
    return Rollout((7,) * length, (7,) * length, mask, (0.0,) * length, Reward(0.0, {}), "", "length", 0)


def group(name: str, *rollouts: Rollout) -> Group:
    return Group(Prompt(name, name, "", {}), rollouts, ())


def test_a_minute_a_pass_affords_a_token_or_none(build: Build) -> None:
    subject = slow(build(**LONG))
    assert subject.token_seconds == pytest.approx(60 / 32)
    assert affordable_tokens(subject, 0.5) == 1
    assert affordable_tokens(subject, 1) == 0


def test_what_is_affordable_stays_as_it_is() -> None:
    groups = [group("a", rollout(3, 10), rollout(3, 20)), group("b", rollout(5, 4))]
    assert tokens_of(groups) == 12 + 22 + 8
    assert shorten_groups(groups, 42) == groups


def test_beyond_it_the_two_shortest_groups_are_cut_but_for_prompts_and_first_tokens() -> None:
    long, short, middle = (group(name, rollout(p, 40), rollout(p, 30)) for name, p in (("l", 90), ("s", 3), ("m", 20)))
    cut = shorten_groups([long, short, middle], 48)
    assert [g.prompt.id for g in cut] == ["s", "m"]
    # 12 tokens each: ten of the short prompt's completions, eight after the prompt that takes more than that
    assert [[r.num_loss_tokens for r in g.rollouts] for g in cut] == [[10, 10], [8, 8]]
    assert [[len(r.input_ids) for r in g.rollouts] for g in cut] == [[12, 12], [27, 27]]
    assert [len(g.rollouts) for g in shorten_groups([long, short, middle], 48, num_rollouts=1)] == [1, 1]


def test_groups_and_rollouts_come_first_whose_gradient_is_not_0() -> None:
    sure, unsure = rollout(3, 10), replace(rollout(3, 20), sampler_logprobs=(*[0.0] * 21, -0.5))
    groups = [group("a", sure, sure), group("b", sure, sure), group("c", sure, unsure)]
    assert [g.prompt.id for g in first_groups(groups)] == ["c", "a", "b"]
    kept = shorten_groups(groups, 48, num_rollouts=1)
    assert (kept[0].prompt.id, kept[0].rollouts[0].reward) == ("c", unsure.reward)
    assert any(kept[0].rollouts[0].sampler_logprobs)


def test_a_gradient_in_half_precision_is_compared_after_the_beginning_of_a_text() -> None:
    (found,) = begin_with_text([group("a", rollout(2, 2))], [1, 3])[0].rollouts
    assert (found.input_ids, found.target_ids) == ((1, 3, 7, 7, 7), (3, 7, 7, 7, 7))
    assert (found.loss_mask, found.sampler_logprobs) == ((False, False, False, True, True), (0.0,) * 5)
    masked = replace(rollout(2, 2), input_length=3)
    assert begin_with_text([group("a", masked)], [1, 3])[0].rollouts == (masked,)


def test_two_zero_gradients_agree_and_one_against_zero_differs_infinitely() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert _relative_error([(zero, zero)]) == 0
    assert _relative_error([(one, zero)]) == math.inf
    assert _relative_error([(zero, one)]) == pytest.approx(1)


@pytest.mark.long
def test_a_slow_machine_passes_every_check_on_fewer_tokens_and_reports_them(build: Build) -> None:
    checks = {check.name: check for check in run_checks(slow(build(Arithmetic(levels=[1]), **LONG)))}
    assert [check.figure for check in checks.values() if not check.passed] == []
    assert len(checks["gradient"].values) == 1
    assert " over 1 layouts and splits of 44 tokens" in checks["gradient"].figure
    assert "against plain transformers over 11 tokens" in checks["true gradient"].figure
    assert "which would take too long" in checks["transformers"].figure


@pytest.mark.long
def test_a_wrong_backward_pass_is_refused_on_a_slow_machine_too(build: Build) -> None:
    subject = slow(build(**LONG, model__kernels="torch"))
    for layer in subject.run.policy.causal_lm.base_model.layers:  # type: ignore[union-attr]
        layer.mlp.register_full_backward_hook(lambda m, inner, outer: tuple(2 * g for g in inner))
    assert not finding(subject, "true gradient").passed
