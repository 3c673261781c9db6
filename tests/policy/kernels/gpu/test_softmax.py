"""The head's softmax in few passes: the numbers of the plain one, for whatever number of tokens it was compiled."""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.exc import InductorError
from torch._inductor.utils import run_and_get_code

from covey.policy.head import _gradient_, _score_, score_rows
from covey.policy.kernels.gpu import inductor, softmax
from covey.policy.kernels.gpu.softmax import fused_gradient, fused_scores

from ....support.builders import nano
from ....support.pretend_gpu import PretendGpu
from ...test_head import are_close, head_of, plain, results

V = 37


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    inductor.compile_once.cache_clear()
    yield
    inductor.compile_once.cache_clear()


@pytest.fixture
def as_traced(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """What torch traces of the functions, run as it is; one graph a compilation."""
    torch._dynamo.reset()
    counter, compile_ = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_(function, backend=counter, **how))
    return counter


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [3, 7])
@pytest.mark.parametrize("of_entropy", [0.0, 0.3])
def test_fused_scores_and_gradients_are_the_plain_ones(
    temperature: float, chunk: int, of_entropy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "compile_once", lambda function: function)
    head = head_of(chunk, temperature=temperature, entropy_gradient=of_entropy > 0)
    found = results(score_rows, replace(head, fused=True), of_entropy=of_entropy)
    assert are_close(found, results(plain, head, of_entropy=of_entropy), 1e-12)
    assert are_close(found, results(score_rows, head, of_entropy=of_entropy), 1e-14)


def test_other_numbers_of_tokens_recompile_nothing(as_traced: CompileCounter) -> None:
    for num_tokens in range(2, 12):
        logits, target_L = torch.randn(num_tokens, V, dtype=torch.float64), torch.arange(num_tokens) % V
        _, entropy_L, logsum_L = fused_scores(logits, target_L, 0.7)
        assert torch.allclose((logits / 0.7 - logsum_L[:, None]).exp().sum(-1), torch.ones(num_tokens).double())
        ones_L, out = torch.ones(num_tokens, dtype=torch.float64), torch.empty_like(logits)
        fused_gradient(logits, target_L, ones_L, None, (logsum_L, entropy_L), 0.7, out)
    assert as_traced.frame_count == 2, "sums and gradient, once each"


def test_gradients_are_written_in_the_type_of_the_products_they_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "compile_once", lambda function: function)
    head = replace(head_of(), fused=True, precision=torch.bfloat16)
    logits, target_L = torch.randn(3, V), torch.arange(3)
    scored = _score_(head, logits.clone(), target_L)
    assert torch.equal(scored.values_LV, logits), "they are only read"
    found = _gradient_(head, scored, target_L, torch.tensor([1.0, -2.0, 0.5]))
    wanted = torch.tensor([[1.0], [-2.0], [0.5]]) * (torch.eye(3, V) - logits.softmax(-1))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted.to(torch.bfloat16), rtol=0.01, atol=1e-6)


def test_what_cannot_be_compiled_runs_as_it_is_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        def fail(*given: Any) -> Any:
            raise InductorError(RuntimeError("no such instruction"), None)

        return fail

    monkeypatch.setattr(torch, "compile", compile_)
    head = head_of()
    with caplog.at_level(logging.WARNING):
        found = [results(score_rows, replace(head, fused=True)) for _ in range(2)]
    assert are_close(found[1], results(score_rows, head), 1e-14)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "one for each function"
    assert all("uncompiled" in line and "no such instruction" in line for line in said)


@pytest.mark.parametrize(
    ("kernels", "device", "has_triton", "expected"),
    [
        ("auto", "cuda", True, True),
        ("liger", "cuda", True, True),
        ("torch", "cuda", True, False),
        ("auto", "cpu", True, False),
        ("auto", "cuda", False, False),
    ],
)
def test_it_is_compiled_on_a_gpu_with_triton_unless_torch_alone_is_asked_for(
    kernels: str, device: str, has_triton: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ModuleSpec("triton", None) if has_triton else None
    monkeypatch.setattr(inductor, "find_spec", lambda name: found if name == "triton" else pytest.fail(name))
    assert inductor.is_wanted(kernels, torch.device(device)) is expected


def test_a_policy_says_whether_it_is_compiled_and_a_deterministic_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not nano().compiles
    monkeypatch.setattr(inductor, "is_wanted", lambda kernels, device: True)
    assert nano().compiles
    with PretendGpu():
        assert nano().compiles
        assert not nano(deterministic=True).compiles


@pytest.mark.slow
@pytest.mark.parametrize("function", [softmax.sums, softmax.gradient])
def test_compiled_nothing_as_large_as_the_logits_is_made_beside_them(function: Callable[..., Any]) -> None:
    """By torch's own code generator, for this processor."""
    torch._dynamo.reset()
    num_tokens, divisor = 6, torch.tensor(0.7, dtype=torch.float64)
    logits, out = torch.randn(num_tokens, 5000), torch.zeros(num_tokens, 5000, dtype=torch.bfloat16)
    rest: dict[Any, tuple[Any, ...]] = {
        softmax.sums: (divisor,),
        softmax.gradient: (torch.arange(num_tokens), torch.randn(num_tokens), torch.randn(num_tokens), divisor, out),
    }
    wanted, written = function(logits, *rest[function]), out.clone()
    out.zero_()
    got, (code,) = run_and_get_code(inductor.compile_once(function), logits, *rest[function])
    torch.testing.assert_close(out, written, rtol=0.01, atol=1e-6)
    for one, other in zip(got or (), wanted or (), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    made = re.findall(r"= empty_strided_cpu\(\(([^()]*)\)", code)
    assert len(made) == (4 if function is softmax.sums else 0)
    assert all(shape.endswith((", 1", ", ")) for shape in made), "a number a row"
