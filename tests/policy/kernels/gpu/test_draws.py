"""The draw as one kernel, through Triton's interpreter on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covey.engine.native import graph
from covey.policy.kernels.gpu import trials
from covey.policy.sampling import BLOCK, draw, filtered_logprobs, random_uniform, row_key, sample_same_params

from ....support.builders import nano

pytest.importorskip("triton", reason="needs Triton: pip install triton")
from covey.policy.kernels.gpu import draws

KEYS = torch.tensor([row_key(7, index) for index in range(12)])
POSITIONS = torch.arange(12) * 11


def logits_of(num_tokens: int) -> Tensor:
    logits = 3 * torch.randn(12, num_tokens, generator=torch.Generator().manual_seed(0))
    logits[:, ::2] = -torch.inf
    return logits


@pytest.mark.parametrize("num_tokens", [5, BLOCK - 7, 3 * BLOCK, 3 * BLOCK + 1, 20 * BLOCK + 3])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_one_kernel_draws_what_operations_draw(num_tokens: int, temperature: float) -> None:
    logits = logits_of(num_tokens)
    token, logprob = draws.draw_tempered(logits, temperature, KEYS, POSITIONS)
    wanted = sample_same_params(logits, (temperature, 0, 1.0, 0.0), random_uniform(KEYS, POSITIONS))
    assert torch.equal(token, wanted[0])
    torch.testing.assert_close(logprob, wanted[1], rtol=0, atol=1e-5)


def test_a_row_is_drawn_alike_beside_any_other_and_from_any_strides() -> None:
    logits = logits_of(700)
    whole = draws.draw_tempered(logits, 0.9, KEYS, POSITIONS)
    alone = draws.draw_tempered(logits[3:4], 0.9, KEYS[3:4], POSITIONS[3:4])
    apart = draws.draw_tempered(torch.cat((logits, logits), dim=1)[:, :700], 0.9, KEYS, POSITIONS)
    assert [each[3].item() for each in whole] == [each.item() for each in alone]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(whole, apart, strict=True))


def test_the_ends_of_the_uniform_numbers_draw_tokens_that_have_a_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = logits_of(3 * BLOCK + 1)[:2]
    for uniform in (0.0, 1.0 - 2.0**-53):
        monkeypatch.setattr(
            draws, "_uniform", lambda key, position, value=uniform: key.to(draws.tl.float64) * 0 + value
        )
        token, _ = draws.draw_tempered(logits, 1.0, KEYS[:2], POSITIONS[:2])
        wanted, _ = draw(filtered_logprobs(logits), torch.full((2,), uniform, dtype=torch.float64))
        assert torch.equal(token, wanted)
        assert logits.gather(1, token[:, None]).isfinite().all()


def test_logits_that_are_no_numbers_draw_some_token() -> None:
    logits = logits_of(700)
    logits[0] = torch.nan
    token, logprob = draws.draw_tempered(logits, 1.0, KEYS, POSITIONS)
    assert 0 <= int(token[0]) < 700
    assert logprob[0].isnan()
    assert logprob[1:].isfinite().all()


def test_greedy_cut_and_mixed_rows_are_drawn_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "compile_once", lambda function: function)
    monkeypatch.setattr(graph, "computes", lambda *given: True)
    policy = replace(nano(), compiles=True)
    logits, plain = logits_of(300), (1.0, 0, 1.0, 0.0)
    monkeypatch.setattr(draws, "draw_tempered", lambda *given: (given[1], None))
    assert graph.draw_of([(plain, None)], policy)(logits, KEYS, POSITIONS)[0] == 1.0
    for other in ((0.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 0, 1.0, 0.2)):
        found = graph.draw_of([(other, None)], policy)(logits, KEYS, POSITIONS)
        wanted = sample_same_params(logits, other, random_uniform(KEYS, POSITIONS))
        assert torch.equal(found[0], wanted[0])
    rows = torch.arange(12)
    mixed = [(plain, rows[:6]), ((0.5, 0, 1.0, 0.0), rows[6:])]
    assert graph.draw_of(mixed, policy)(logits, KEYS, POSITIONS)[0].shape == (12,)


def test_a_kernel_that_is_wrong_or_refused_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = torch.device("cpu")
    trials.computes.cache_clear()
    assert trials.computes("draw", cpu)
    for trial, told in (
        (lambda device: 0.5, "draw runs as operations of torch, slower: its kernel is wrong by 0.5"),
        (lambda device: 1 / 0, "draw runs as operations of torch, slower: division by zero"),
    ):
        trials.computes.cache_clear()
        monkeypatch.setitem(trials.TRIALS, "draw", trial)
        assert not trials.computes("draw", cpu)
        assert caplog.messages[-1] == told
    trials.computes.cache_clear()
