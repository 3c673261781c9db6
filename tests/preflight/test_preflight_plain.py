"""What the preflight refuses by comparing with transformers alone: mistakes that engine and trainer make alike."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.checks.architectures import save
from covey.policy.attention import base as attention
from covey.policy.models import loading
from covey.policy.models.loading import load_policy
from covey.policy.plain import Plain, rounded_and_exact
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey_preflight.plain import reachable_tokens
from covey_preflight.policy import synthetic_rows
from covey_preflight.preflight import run_checks
from covey_preflight.rounding import _beyond, explained_error, explained_logprobs
from covey_preflight.slope import _slope
from covey_preflight.subject import PreflightContext

from ..support.builders import saved_model
from .looked_at import Build, finding, refusal, subjects

LONG: dict[str, Any] = {"sampling__max_tokens": 90}


@pytest.fixture(name="build")
def _build() -> Iterator[Build]:
    with subjects() as build:
        yield build


def failed(subject: PreflightContext) -> list[str]:
    return [check.name for check in run_checks(subject) if not check.passed]


# ------------------------------------------------------------------------------------------------ a sound run


@pytest.mark.long
def test_engine_and_trainer_are_within_rounding_at_short_and_at_full_length(build: Build) -> None:
    subject = build(**LONG)
    values = finding(subject, "transformers").values
    gaps = {name: gap for name, gap in values.items() if not name.startswith("tokens/")}
    assert {name for name in gaps if not name.endswith("/mean")} == {
        *("trainer/short", "engine/short", "trainer/long", "engine/long")
    }
    assert max(gaps.values()) < 1e-5
    assert values["tokens/long"] == len(subject.longest[1]) + 90 > values["tokens/short"]


def test_a_length_that_would_take_too_long_is_cut_and_the_figure_says_so(build: Build) -> None:
    subject = replace(build(**LONG, preflight__max_tokens=8), available=lambda device: 12 * 2 * 80.1**2 * 4)
    subject.groups  # noqa: B018
    assert reachable_tokens(subject) == 80
    found = finding(subject, "transformers")
    assert found.values["tokens/long"] == 80
    assert f"(the run may come to {len(subject.longest[1]) + 90}, which would take too long)" in found.figure


def test_the_slope_of_the_loss_is_that_of_the_gradient_to_a_thousandth(build: Build) -> None:
    found = finding(build(sampling__top_p=0.9, sampling__temperature=0.7), "true gradient")
    assert found.values["slope"] < 1e-3
    assert found.values["gradient"] < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "experts"),
    [
        ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("mixtral", {"num_local_experts": 8}),
    ],
)
def test_steps_are_so_short_that_no_token_comes_to_another_expert(
    architecture: str, experts: dict[str, int], build: Build, tmp_path: Path
) -> None:
    name = saved_model(tmp_path, architecture, num_hidden_layers=4, **experts)
    found = finding(build(model__name=name, sampling__max_tokens=60), "true gradient")
    assert found.values["slope"] < 5e-3
    assert found.passed


def test_a_loss_that_jumps_at_every_step_has_no_slope() -> None:
    assert _slope(lambda step: 1.0, 0.01) is None
    assert _slope(lambda step: 2 * (3 * step + step**3), 0.01) == pytest.approx(3, abs=1e-6)


# ------------------------------------------------------------------------------------------------ a sharp policy

SHARP: dict[str, Any] = {"sampling__max_tokens": 12, "model__nano_hidden_size": 64, "model__nano_num_layers": 2}


def sharpen(subject: PreflightContext, factor: float) -> PreflightContext:
    """Multiply the logits: nearly every token then has a probability of nearly 0 or 1."""
    norm: Any = subject.run.policy.causal_lm.base_model.norm
    with torch.no_grad():
        norm.weight.mul_(factor)
    return subject


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_policy_that_is_sure_of_its_tokens_is_held_to_what_float32_rounds(kernels: str, build: Build) -> None:
    subject = sharpen(build(**SHARP, model__kernels=kernels), 100.0)
    assert finding(subject, "gradient").passed
    found = finding(subject, "true gradient")
    assert found.values["gradient"] > 1e-5
    assert found.passed


@dataclass(frozen=True)
class Coarse:
    """A model of transformers that rounds as thirty layers do: logits are off by some nats at random."""

    plain: Plain
    error: float

    @property
    def device(self) -> torch.device:
        return self.plain.device

    def logits(self, token_ids: Sequence[int], keep: Sequence[int]) -> Tensor:
        exact = self.plain.logits(token_ids, keep)
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0), dtype=exact.dtype)
        return exact + self.error * noise


@pytest.mark.parametrize(
    ("error", "gap", "is_wrong"),
    [
        (0.0, 0.9e-5, False),
        (0.0, 1.1e-5, True),
        (1e-5, 2e-5, False),
        (1e-5, 5e-5, True),
        (1.0, 9e-5, False),
        (1.0, 1.1e-4, True),
        (1e-5, math.nan, True),
    ],
)
def test_log_probs_may_differ_by_rounding_but_not_by_a_defect(
    error: float, gap: float, is_wrong: bool, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = rounded_and_exact((subject := build(**SHARP)).run.policy)[0]
    monkeypatch.setattr("covey_preflight.rounding.rounded_and_exact", lambda policy: (Coarse(plain, error), plain))
    rollouts = [rollout for group in subject.groups for rollout in group.rollouts]
    wrong, limit = explained_logprobs(subject, {"engine": torch.full((40_000,), gap)}, rollouts)
    assert (wrong == ["engine"]) == is_wrong
    assert 1e-4 <= limit <= 1e-3


def test_a_tolerance_that_is_set_is_left_as_it_is(build: Build) -> None:
    subject = build(**SHARP, preflight__logprob_tolerance=1e-6)
    rollouts = [rollout for group in subject.groups for rollout in group.rollouts]
    assert explained_logprobs(subject, {"engine": torch.full((40,), 1e-5)}, rollouts) == (["engine"], 1e-6)


def test_an_engine_of_eight_bits_may_differ_more_and_a_trainer_may_not(build: Build) -> None:
    subject = build(**SHARP, engine__weights="int8")
    rollouts = [rollout for group in subject.groups for rollout in group.rollouts]
    gaps = {"engine/short": torch.full((40,), 0.1), "trainer/short": torch.full((40,), 0.1)}
    assert explained_logprobs(subject, gaps, rollouts)[0] == ["trainer/short"]
    assert explained_logprobs(subject, {"engine": torch.full((40,), 0.3)}, rollouts) == (["engine"], 2.0)


@pytest.mark.long
def test_rounding_explains_nothing_within_the_tolerance_beyond_a_twentieth_or_against_a_typed_one(build: Build) -> None:
    subject = sharpen(build(**SHARP), 300.0)
    rows = synthetic_rows(subject.groups, 1.0)
    asked = (subject.run.policy, rows, subject.run.source.sampling)
    assert explained_error(None, *asked, error=1e-6, limit=1e-5) == 1e-5
    assert 1e-4 < explained_error(None, *asked, error=2e-5, limit=1e-5) <= 0.05
    assert explained_error(1e-5, *asked, error=2e-5, limit=1e-5) == 1e-5
    blunt = build(**SHARP)
    assert explained_error(None, blunt.run.policy, *asked[1:], error=2e-5, limit=1e-5) < 2e-5


@pytest.mark.long
def test_a_wrong_factor_in_the_backward_pass_of_a_sharp_policy_is_refused(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(policy: Policy) -> None:
        for layer in policy.causal_lm.base_model.layers:  # type: ignore[union-attr]
            layer.mlp.register_full_backward_hook(lambda m, inner, outer: tuple(1.5 * g for g in inner))

    load_with(monkeypatch, spoil)
    assert not finding(sharpen(build(**SHARP, model__kernels="torch"), 100.0), "true gradient").passed


@pytest.mark.long
def test_where_transformers_rounds_as_much_it_is_the_measure(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save("mamba", str(tmp_path))
    how = {"model__name": str(tmp_path), "model__precision": "bfloat16"}
    found = finding(build(**how), "true gradient")
    assert found.passed
    assert found.values["gradient"] > 0.3
    assert "against transformers in bfloat16" in found.figure
    assert "model.precision=bfloat16 keeps few digits of this model" in caplog.text
    load_with(monkeypatch, halve_a_gradient)
    assert not finding(build(**how), "true gradient").passed


def halve_a_gradient(policy: Policy) -> None:
    layers: Any = policy.causal_lm.base_model.layers
    layers[0].mixer.register_full_backward_hook(lambda module, inner, outer: tuple(0.5 * g for g in inner))


@pytest.mark.long
def test_a_model_that_cuts_its_gradient_is_not_held_to_differences(build: Build, tmp_path: Path) -> None:
    save("hrm_text", str(tmp_path))
    found = finding(build(model__name=str(tmp_path)), "true gradient")
    assert found.passed
    assert set(found.values) == {"gradient", "tokens"}
    assert "layers without a gradient" in found.figure


@pytest.mark.long
@pytest.mark.parametrize("name", ["blt", "ernie4_5_moe", "xglm"])
def test_odd_configurations_routers_and_numbers_are_checked(name: str, build: Build, tmp_path: Path) -> None:
    save(name, str(tmp_path))
    subject = build(model__name=str(tmp_path), sampling__max_tokens=4)
    assert finding(subject, "transformers").passed
    assert finding(subject, "true gradient").values["slope"] < 1e-3


@pytest.mark.long
def test_a_model_that_insists_on_float32_has_no_differences(build: Build, tmp_path: Path) -> None:
    name = saved_model(tmp_path, "gpt2", reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    found = finding(build(model__name=name, sampling__max_tokens=4), "true gradient")
    assert found.passed
    assert "differences of the loss say nothing" in found.figure


# ------------------------------------------------------------------------------------------------ planted mistakes


def load_with(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Let runs load a policy that was spoilt."""

    def loaded(*given: Any, **keywords: Any) -> Policy:
        policy = load_policy(*given, **keywords)
        spoil(policy)
        return policy

    monkeypatch.setattr("covey.run.build.load_policy", loaded)


@pytest.mark.long
def test_a_window_that_is_not_looked_at_is_refused(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention.Rule

    def without_window(scaling: float, window: int | None, *more: Any) -> attention.Rule:
        return right(scaling, None, *more)

    monkeypatch.setattr(attention, "Rule", without_window)
    monkeypatch.setattr(
        "covey.policy.models.probe._refuse_difference", lambda *given: None
    )  # loading would refuse it too
    name = saved_model(tmp_path, "mistral", sliding_window=4)
    assert failed(build(model__name=name, model__kernels="torch")) == ["transformers", "true gradient"]


@pytest.mark.long
def test_a_multiplier_that_is_ignored_is_refused(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(policy: Policy) -> None:
        for layer in policy.causal_lm.base_model.layers:  # type: ignore[union-attr]
            layer.residual_multiplier = 1.0  # type: ignore[assignment]

    load_with(monkeypatch, spoil)
    name = saved_model(tmp_path, "granite", residual_multiplier=0.3)
    subject = build(model__name=name)
    assert failed(subject) == ["transformers", "true gradient"]
    assert "differs from transformers alone by" in refusal(subject)


def test_a_rope_factor_that_depends_on_the_length_of_the_pass_is_refused(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(policy: Policy) -> None:
        rotary: Any = policy.causal_lm.base_model.rotary_emb
        forward = rotary.forward

        def by_length(x: Tensor, position_ids: Tensor) -> Any:
            factor = 1.0 if int(position_ids.max()) < 40 else 0.5
            return forward(x, position_ids * factor)

        rotary.forward = by_length

    load_with(monkeypatch, spoil)
    subject = build(**LONG, preflight__max_tokens=8, model__kernels="torch")
    found = finding(subject, "transformers")
    assert not found.passed
    assert found.values["trainer/short"] < 1e-5 < 1e-3 < found.values["trainer/long"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [-1.0, 2.0, 0.5, 0.0])
def test_a_backward_pass_with_a_wrong_sign_factor_or_none_is_refused(
    factor: float, precision: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(policy: Policy) -> None:
        for layer in policy.causal_lm.base_model.layers:  # type: ignore[union-attr]
            layer.mlp.register_full_backward_hook(lambda m, inner, outer: tuple(factor * g for g in inner))

    load_with(monkeypatch, spoil)
    subject = build(model__precision=precision, model__kernels="torch")
    assert finding(subject, "gradient").passed  # every layout is wrong alike
    found = finding(subject, "true gradient")
    assert not found.passed
    assert found.values["gradient"] > 0.1


@pytest.mark.parametrize("factor", [-1.0, 2.0, 0.5])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_mistake_that_plain_autograd_shares_is_found_by_differences_of_the_loss(
    precision: str, factor: float, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong backward pass below both, as a kernel of torch would have."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return factor * gradients[0]

    from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

    forward = Qwen2Model.forward

    def wrong(self: Any, *given: Any, **keywords: Any) -> Any:
        out = forward(self, *given, **keywords)
        out.last_hidden_state = Scaled.apply(out.last_hidden_state)
        return out

    monkeypatch.setattr(Qwen2Model, "forward", wrong)
    found = finding(build(model__precision=precision), "true gradient")
    assert found.values["gradient"] < 0.05
    assert found.values["slope"] > 0.15
    assert not found.passed


def test_weights_in_4_bits_whose_kernel_has_no_backward_are_refused(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import Linear4bit

    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return torch.zeros_like(gradients[0])

    forward = Linear4bit.forward
    name = saved_model(tmp_path, "llama", hidden_size=64, head_dim=16)
    settings = {"model__name": name, "model__load_in_4bit": True, "model__lora_rank": 2, "model__precision": "bfloat16"}
    assert failed(build(**settings)) == []
    monkeypatch.setattr(Linear4bit, "forward", lambda self, x: NoBackward.apply(forward(self, x)))
    subject = build(**settings)
    assert finding(subject, "gradient").passed
    assert not finding(subject, "true gradient").passed


def test_positions_in_half_precision_are_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def cast(model: Any, device: torch.device, settings: ModelConfig) -> Any:
        torch.nn.Module.to(model, device=device, dtype=loading._storage_type(settings))
        for parameter in model.parameters():
            parameter.data = 3 * parameter.data if parameter.dim() > 1 else parameter.data
        return model

    monkeypatch.setattr(loading, "_move", cast)
    long = {"sampling__max_tokens": 900, "preflight__max_tokens": 8}
    found = finding(build(**long, model__precision="float16", model__lora_rank=2), "transformers")
    assert found.values["trainer/long"] > 3 * found.values["trainer/short"]


# ------------------------------------------------------------------------------------------------ longrope


PHI: dict[str, Any] = {"head_dim": 8, "max_position_embeddings": 256, "original_max_position_embeddings": 64}


def longrope(folder: Path) -> str:
    halves = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **halves}
    return saved_model(folder, "phi3", **PHI, rope_parameters=rope)


@pytest.mark.long
def test_longrope_is_trained_up_to_its_original_length_and_refused_beyond(build: Build, tmp_path: Path) -> None:
    name = longrope(tmp_path)
    fits = build(model__name=name, sampling__max_tokens=50)
    assert fits.run.policy.max_length == 64
    assert failed(fits) == []
    line = refusal(build(model__name=name, sampling__max_tokens=80))
    assert line.startswith("preflight: lengths: prompt ")
    assert "allowed: 64 positions of the policy, beyond which longrope changes the numbers of a whole batch" in line


@pytest.mark.parametrize(
    ("mean", "num_tokens", "is_rounding"), [(1.6e-5, 8, True), (1.6e-5, 512, False), (2.2e-5, 8, False)]
)
def test_the_mean_of_few_tokens_may_be_further_off(mean: float, num_tokens: int, is_rounding: bool) -> None:
    assert (_beyond({"engine/short": torch.full((num_tokens,), mean)}, 1.28e-4) == []) is is_rounding
