"""Which parts of a model compute through C, and what stays as it was."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from covey.engine.native.engine import NativeEngine
from covey.policy.attention.base import DENSE
from covey.policy.kernels.compiler import compiler_version, load
from covey.policy.kernels.layers import COMPILED, CompiledAttention, choose_kernels, use_compiled
from covey.policy.kernels.support import unsupported_reason
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig

from ...engine.native.test_engine import GENEROUS
from ...engine.tiny import tiny_policy
from ...support.builders import make_policy, nano

FAMILY = ["llama", "mistral", "qwen2", "qwen3"]
WINDOWED = [f"{name}-window" for name in ("mistral", "qwen2")]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13], [13, 12, 11, 10, 9, 8, 7, 6, 5]])


@pytest.fixture(name="_no_compiler")
def _no_compiler_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for found in (load, compiler_version):
        found.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield
    for found in (load, compiler_version):
        found.cache_clear()


def compiled(policy: Policy) -> Policy:
    model = copy.deepcopy(policy.model)
    use_compiled(model)
    return replace(policy, model=model)


def kinds(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if type(module) in COMPILED.values()}


def with_gradients(policy: Policy) -> list[Tensor]:
    policy.model.zero_grad()
    positions = torch.arange(IDS.shape[1]).expand(len(IDS), -1)
    logits = policy.logits(IDS, positions, DENSE)
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return [logits.detach(), *(p.grad for p in policy.model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("architecture", [*FAMILY, *WINDOWED])
def test_log_probs_and_gradients_of_a_model_stay(architecture: str) -> None:
    plain = tiny_policy(architecture)
    mine = compiled(plain)
    exact = replace(plain, model=copy.deepcopy(plain.model).double())
    got, float32, float64 = (with_gradients(policy) for policy in (mine, plain, exact))
    for own, theirs, true in zip(got, float32, float64, strict=True):
        assert (own - true).norm() <= max(2 * float((theirs - true).norm()), 1e-6 * float(true.norm()))
    assert not torch.equal(got[0], float32[0])


@pytest.mark.parametrize("architecture", FAMILY)
def test_norms_gates_and_attention_are_taken_and_no_name_of_a_weight_changes(architecture: str) -> None:
    plain = make_policy(architecture)
    mine = compiled(plain)
    name = architecture.capitalize()
    assert kinds(mine.model) == {f"Compiled{name}{part}" for part in ("RMSNorm", "MLP", "Attention")}
    assert not kinds(plain.model)
    states = [policy.model.state_dict() for policy in (plain, mine)]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_model_of_compiled_parts_is_saved_whole_as_any_other(tmp_path: Path) -> None:
    policy = nano()
    assert kinds(policy.model)
    torch.save(policy.model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert kinds(loaded) == kinds(policy.model)
    assert torch.equal(loaded(input_ids=IDS).logits, policy.model(input_ids=IDS).logits)


def test_only_classes_that_are_known_exactly_are_taken() -> None:
    class OwnNorm(LlamaRMSNorm):
        pass

    config = make_policy("llama").causal_lm.config
    other = copy.deepcopy(config)
    other.hidden_act = "gelu"
    modules = nn.ModuleList([OwnNorm(8), LlamaRMSNorm(8), nn.RMSNorm(8), LlamaMLP(config), LlamaMLP(other)])
    use_compiled(modules)
    taken = [OwnNorm, COMPILED[LlamaRMSNorm], nn.RMSNorm, COMPILED[LlamaMLP], LlamaMLP]
    assert [type(module) for module in modules] == taken


def test_float64_is_computed_with_the_bits_of_torch() -> None:
    plain = make_policy("qwen3")
    mine, theirs = (with_gradients(at(policy, torch.float64)) for policy in (compiled(plain), plain))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def at(policy: Policy, dtype: torch.dtype) -> Policy:
    return replace(policy, model=policy.model.to(dtype), precision=dtype)


@pytest.mark.parametrize("architecture", FAMILY)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_in_half_precision_as_much_is_rounded_as_by_torch(architecture: str, weights: torch.dtype) -> None:
    plain = make_policy(architecture)
    plain.model.to(weights)
    exact = replace(plain, model=copy.deepcopy(plain.model).double())
    halves = (replace(policy, precision=torch.bfloat16) for policy in (compiled(plain), plain))
    mine, theirs, true = (with_gradients(policy) for policy in (*halves, exact))
    off = [sum(float((g - t).norm() / t.norm()) for g, t in zip(got, true, strict=True)) for got in (mine, theirs)]
    assert 0 < off[0] <= 1.2 * off[1]  # roundings of one size, in another order
    assert not torch.equal(mine[0], theirs[0])


def test_attention_of_another_implementation_is_that_of_transformers() -> None:
    plain = make_policy("qwen3").causal_lm
    plain.set_attn_implementation("eager")
    mine = copy.deepcopy(plain)
    use_compiled(mine)
    for layer in mine.modules():
        if type(layer) in COMPILED.values() and not isinstance(layer, CompiledAttention):
            layer.__class__ = {own: theirs for theirs, own in COMPILED.items()}[type(layer)]
    assert torch.equal(mine(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_adapters_of_the_inner_layers_are_trained_as_before() -> None:
    plain, mine = (nano(lora_rank=4, kernels=kernels) for kernels in ("torch", "auto"))
    assert kinds(mine.model)
    for policy in (plain, mine):
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.add_(0.1) if "lora_B" in name else None
    got, expected = with_gradients(mine), with_gradients(plain)
    assert len(got) == len(expected) > 10
    for own, theirs in zip(got, expected, strict=True):
        assert torch.allclose(own, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_recomputed_activations_give_the_same_bits() -> None:
    kept, recomputed = (with_gradients(nano(gradient_checkpointing=again)) for again in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


@pytest.mark.parametrize(("kernels", "expected"), [("torch", "torch"), ("auto", "compiled")])
def test_an_engine_samples_through_a_model_of_compiled_parts(kernels: str, expected: str) -> None:
    mine = compiled(tiny_policy("llama"))
    assert NativeEngine(mine, GENEROUS, 8, kernels).kernels == expected


def test_auto_takes_c_where_it_computes_and_torch_elsewhere() -> None:
    assert kinds(nano().model)
    assert not kinds(nano(kernels="torch").model)
    assert kinds(nano(precision="bfloat16").model)
    assert not kinds(nano(precision="float64").model)


def test_the_reason_why_parts_stay_with_torch_is_told() -> None:
    reason = unsupported_reason("layers", [(torch.float64, "cpu")])
    assert reason == "it computes float32 and bfloat16 on a CPU, got float64 on cpu"


def test_a_model_without_such_parts_stays_as_it_is() -> None:
    model = tiny_policy("gpt2").causal_lm
    choose_kernels(model, "auto", torch.float32, torch.device("cpu"))
    assert not kinds(model)


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_auto_takes_torch() -> None:
    assert not kinds(load_policy(ModelConfig(), seed=0).model)
