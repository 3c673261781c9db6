"""The head's own gradients: those of the plain computation, from three products, whatever was predicted."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from covey.algorithm.softmax import log_softmax
from covey.policy.head import Head, add_rows_in_place, linear_layer, score_rows
from covey.policy.kernels.layers import use_compiled
from covey.policy.kernels.linear import use_onednn
from covey_preflight.passes import LiveBytes

from ..guarantees.update.updates import adapted
from ..support.builders import make_policy, nano, normal, relative_error

L, C, V = 7, 5, 11
CHUNKS = [1, 3, L]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")


def head_of(chunk: int = 3, dtype: torch.dtype = torch.float64, bias: bool = True, **settings: Any) -> Head:
    torch.manual_seed(0)
    return Head(nn.Linear(C, V, bias=bias, dtype=dtype), dtype, settings.pop("temperature", 1.0), chunk, **settings)


def numbers(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, targets, and what log-probs are multiplied by."""
    generator = torch.Generator().manual_seed(1)
    rows = 3 * torch.randn(L, C, generator=generator, dtype=torch.float64)
    coefficients = torch.randn(L, generator=generator, dtype=torch.float64)
    return rows.to(dtype), torch.randint(V, (L,), generator=generator), coefficients.to(dtype)


def plain(head: Head, rows_LC: Tensor, target_L: Tensor, predicted_L: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What is computed, as one writes it down."""
    all_LV = (head.layer(rows_LC) / head.temperature).log_softmax(-1)
    return all_LV.gather(1, target_L[:, None])[:, 0], -(all_LV.exp() * all_LV).sum(-1)


Score = Callable[..., tuple[Tensor, Tensor]]


def results(score: Score, head: Head, predicted_L: Tensor | None = None, of_entropy: float = 0.0) -> list[Tensor]:
    """Log-probs, entropies and all gradients; those of a frozen parameter are left out."""
    head.layer.zero_grad()
    rows, target, coefficients = numbers(head.layer.weight.dtype)
    rows.requires_grad_()
    logprob_L, entropy_L = score(head, rows, target, predicted_L)
    ((logprob_L * coefficients).sum() + of_entropy * (entropy_L * coefficients.flip(0)).sum()).backward()
    gradients = [rows.grad, head.layer.weight.grad, head.layer.bias.grad if head.layer.bias is not None else None]
    return [logprob_L.detach(), entropy_L.detach(), *(found for found in gradients if found is not None)]


def are_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in pairs)


def are_same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@dataclass
class Products(TorchDispatchMode):
    """Counts products of matrices, or other operations."""

    names: tuple[str, ...] = PRODUCTS
    count: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += str(func.name()).startswith(self.names)  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


def num_products(head: Head, predicted_L: Tensor | None = None) -> int:
    with Products() as products:
        results(score_rows, head, predicted_L)
    return products.count


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("predicts", [True, False])
def test_scores_and_gradients_are_those_of_the_plain_computation(
    chunk: int, dtype: torch.dtype, bias: bool, predicts: bool
) -> None:
    head = head_of(chunk, dtype, bias, temperature=0.7)
    expected = results(plain, head)
    assert len(expected) == 5 if bias else 4
    assert are_close(results(score_rows, head, numbers(dtype)[2] if predicts else None), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_gradient_flows_through_the_entropy_where_it_is_asked_for(chunk: int) -> None:
    head = head_of(chunk, temperature=0.7, entropy_gradient=True)
    expected = results(plain, head, of_entropy=0.3)
    assert are_close(results(score_rows, head, numbers()[2], of_entropy=0.3), expected, 1e-12)
    assert not are_close(expected, results(plain, head), 1e-3)
    assert are_same(results(score_rows, head), results(score_rows, replace(head, entropy_gradient=False)))


def test_entropy_and_its_gradient_are_finite_where_one_token_has_all_the_probability() -> None:
    head = head_of(entropy_gradient=True)
    with torch.no_grad():
        head.layer.weight.mul_(1e4)
    found = results(score_rows, head, of_entropy=0.3)
    assert all(bool(values.isfinite().all()) for values in found[:3])
    assert float(found[1].abs().max()) < 1e-60


@pytest.mark.parametrize("trained", [("weight",), ("bias",), ()])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(trained: tuple[str, ...], chunk: int) -> None:
    head = head_of(chunk)
    for name, parameter in head.layer.named_parameters():
        parameter.requires_grad_(name in trained)
    expected = results(plain, head)
    assert len(expected) == 3 + len(trained)
    assert are_close(results(score_rows, head), expected, 1e-12)


def test_hidden_states_that_need_no_gradient_get_none() -> None:
    head, (rows, target, coefficients) = head_of(), numbers()
    (score_rows(head, rows, target)[0] * coefficients).sum().backward()
    assert rows.grad is None
    assert torch.allclose(head.layer.weight.grad, results(plain, head)[3], rtol=1e-12)


@pytest.mark.parametrize("onednn", [False, True])
def test_a_wrong_prediction_costs_time_and_changes_no_bit(onednn: bool) -> None:
    head = head_of(dtype=torch.float32)
    if onednn:
        use_onednn(nn.ModuleList([head.layer]))
    right = numbers(torch.float32)[2]
    expected, wrong = results(score_rows, head), right.clone()
    wrong[L - 1] = torch.nextafter(right[L - 1], torch.tensor(9.0))
    for predicted in (right, wrong, torch.full_like(right, torch.nan)):
        assert are_same(results(score_rows, head, predicted), expected)
    # Three chunks; of each logits, again logits, and two gradients.
    assert [num_products(head), num_products(head, right), num_products(head, wrong)] == [12, 9, 18]


def test_each_chunk_of_the_head_takes_three_products_or_two_if_frozen() -> None:
    assert num_products(head_of(L)) == num_products(head_of(L), numbers()[2]) == 3
    head = head_of(chunk=1)
    head.layer.requires_grad_(False)
    assert num_products(head) == 2 * L


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("predicts", [True, False])
def test_gradients_are_handed_over_without_a_copy(chunk: int, predicts: bool) -> None:
    head, (rows, target, coefficients) = head_of(chunk), numbers()
    loss = (score_rows(head, rows, target, coefficients if predicts else None)[0] * coefficients).sum()
    with Products(("aten::clone", "aten::copy_")) as copies:
        loss.backward()
    assert copies.count == 0


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("predicts", [True, False])
def test_a_second_backward_pass_through_the_same_graph_gives_the_same(chunk: int, predicts: bool) -> None:
    head, (rows, target, coefficients) = head_of(chunk), numbers()
    loss = (score_rows(head, rows, target, coefficients if predicts else None)[0] * coefficients).sum()
    first, again = (torch.autograd.grad(loss, list(head.layer.parameters()), retain_graph=True) for _ in range(2))
    assert are_same(list(first), list(again))


def test_a_tied_weight_gets_the_gradients_of_both_of_its_uses() -> None:
    def gradient(score: Score) -> Tensor:
        head, (rows, target, coefficients) = head_of(), numbers()
        hidden = rows + head.layer.weight.index_select(0, target.flip(0))
        loss = (score(head, hidden, target, coefficients)[0] * coefficients).sum()
        return torch.autograd.grad(loss, head.layer.weight)[0]

    assert torch.allclose(gradient(score_rows), gradient(plain), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_half_precision_is_what_autocast_computes(precision: torch.dtype, bias: bool) -> None:
    head = replace(head_of(dtype=torch.float32, bias=bias), precision=precision)

    def under_autocast(head: Head, rows: Tensor, target: Tensor, predicted: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", precision):
            logits_LV = head.layer(rows)
        all_LV = log_softmax(logits_LV)
        return all_LV.gather(1, target[:, None])[:, 0], -(all_LV.exp() * all_LV).sum(-1)

    expected = results(under_autocast, head)
    for predicted in (None, numbers(torch.float32)[2]):
        got = results(score_rows, head, predicted)
        assert are_same(got[:2], expected[:2])
        assert are_close(got[2:], expected[2:], 0.03)
        assert [one.dtype for one in got] == [torch.float32] * len(got)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_scores_are_the_same_bits_in_any_chunk_with_and_without_gradient(num_threads: int) -> None:
    torch.manual_seed(0)
    num_rows = 50
    layer, target = nn.Linear(8, 70_000, bias=False), torch.arange(num_rows)  # three slices of a chunk
    rows = torch.randn(num_rows, 8)
    all_LV = log_softmax(layer(rows).detach())
    expected = [all_LV.gather(1, target[:, None])[:, 0], -(all_LV.exp() * all_LV).sum(-1)]
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        head = Head(layer, torch.float32, 1.0, num_rows)
        assert are_same(list(score_rows(head, rows, target)), expected)
        with torch.no_grad():
            assert are_same(list(score_rows(head, rows, target)), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("way", ["predicted", "frozen", "again"])
def test_no_more_than_a_chunk_of_logits_lives_at_any_time(way: str) -> None:
    rows, width, num_entries, chunk = 600, 8, 2000, 50
    layer = nn.Linear(width, num_entries, bias=False)
    layer.requires_grad_(way != "frozen")
    predicted = torch.ones(rows) if way == "predicted" else None
    hidden, target = torch.randn(rows, width, requires_grad=True), torch.zeros(rows, dtype=torch.int64)
    of_chunk, of_weight = 4 * chunk * num_entries, 4 * layer.weight.numel()
    with LiveBytes() as live:
        logprob_L, _ = score_rows(Head(layer, torch.float32, 1.0, chunk), hidden, target, predicted)
        logprob_L.sum().backward()
    # A chunk in place, log-probs of a slice of it, the weight's gradient and what a chunk adds to it.
    assert live.peak < 2.5 * of_chunk + 2.5 * of_weight
    assert 600 * num_entries * 4 > 4 * live.peak


def tied(num_entries: int, width: int) -> tuple[nn.Embedding, nn.Linear]:
    """An embedding whose weight is the head's, products in C."""
    torch.manual_seed(0)
    head, rows = nn.Linear(width, num_entries, bias=False), nn.Embedding(num_entries, width, padding_idx=1)
    rows.weight = head.weight
    layers = nn.ModuleList([head])
    use_onednn(layers)
    use_compiled(layers)
    return rows, head


def passes(embedding: nn.Embedding, head: Head, predicts: bool, score: Score = score_rows) -> None:
    """Two micro-batches, as a step makes them; id 1 is padding."""
    for ids in (torch.tensor([5, 1, 5, 7, 0, 2]), torch.tensor([1, 3, 3, 3, 8, 5])):
        coefficients = normal(len(ids), seed=int(ids[0]))
        logprob_L, _ = score(head, embedding(ids).tanh(), ids.flip(0), coefficients if predicts else None)
        (logprob_L * coefficients).sum().backward()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("predicts", [True, False])
def test_a_tied_weights_gradient_is_added_where_it_stays(precision: torch.dtype, predicts: bool) -> None:
    (rows, layer), (plain_rows, plain_layer) = tied(40, 16), tied(40, 16)
    add_rows_in_place(nn.ModuleList([rows]), at_least=0)
    passes(rows, Head(layer, precision, 1.0, 4, in_place=True), predicts)
    passes(plain_rows.double(), Head(plain_layer.double(), torch.float64, 1.0, 4), predicts, plain)
    assert relative_error(layer.weight.grad, plain_layer.weight.grad) < {torch.float32: 1e-6}.get(precision, 1e-2)


def test_a_wrong_prediction_is_taken_back_from_where_it_was_added() -> None:
    (rows, layer), (plain_rows, plain_layer) = tied(40, 16), tied(40, 16)
    ids, right = torch.tensor([5, 2, 5, 7, 0, 2]), normal(6)
    for head, embedding, predicted in (
        (Head(layer, torch.float32, 1.0, 4, in_place=True), rows, 3 * right),
        (Head(plain_layer, torch.float32, 1.0, 4), plain_rows, right),
    ):
        for _ in range(2):
            (score_rows(head, embedding(ids).tanh(), ids, predicted)[0] * right).sum().backward()
    assert relative_error(layer.weight.grad, plain_layer.weight.grad) < 1e-6


@pytest.mark.parametrize("predicts", [True, False])
def test_no_second_copy_of_the_heads_gradient_lives_at_any_time(predicts: bool) -> None:
    rows, layer = tied(20_000, 64)
    add_rows_in_place(nn.ModuleList([rows]), at_least=0)
    of_weight, of_chunk = 4 * layer.weight.numel(), 4 * 4 * 20_000
    with LiveBytes() as live:
        passes(rows, Head(layer, torch.float32, 1.0, 4, in_place=True), predicts)
    # The gradient; a chunk of logits, in place, and room for what a product lays out.
    assert of_weight < live.peak < of_weight + 2 * of_chunk + 2**20


def test_hooks_hear_of_the_gradient_of_a_weight_that_would_be_added_to() -> None:
    heard: list[Tensor] = []
    for listen in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
        rows, layer = tied(40, 16)
        add_rows_in_place(nn.ModuleList([rows]), at_least=0)
        listen(layer.weight, heard.append)
        passes(rows, Head(layer, torch.float32, 1.0, 4, in_place=True), predicts=True)
    assert len(heard) == 4
    assert all(each.shape == (40, 16) for each in heard)


def test_small_embeddings_are_summed_as_any_layer_is() -> None:
    rows, _ = tied(40, 16)
    add_rows_in_place(nn.ModuleList([rows]))
    assert type(rows) is nn.Embedding


def test_a_layer_that_is_more_than_a_product_is_left_to_the_policy() -> None:
    assert isinstance(linear_layer(make_policy("gpt2")), nn.Linear)
    assert isinstance(linear_layer(nano()), nn.Linear)
    assert linear_layer(make_policy("bert")) is None
    assert linear_layer(replace(make_policy("gpt2"), head_is_linear=False)) is None
    changed = copy.deepcopy(make_policy("gpt2"))
    changed.causal_lm.lm_head = type("Scaled", (nn.Linear,), {})(32, 40)
    assert linear_layer(changed) is None
    assert isinstance(linear_layer(adapted(make_policy("gpt2"), 2)), nn.Linear)
