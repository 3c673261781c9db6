"""The engine of masked policies: what it fills in, in which order, and with which log-probs."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.engine.fill import FillEngine, FillRequest, OwnWeightsFillEngine, Read, _most_confident
from covey.engine.weights import make_weight_set
from covey.policy.attention.bidirectional import WHOLE
from covey.policy.logprobs import Scoring, exact_kl, score_tokens
from covey.policy.policy import Policy
from covey.policy.reference import Reference
from covey.rollouts.rollout import filled_rollout
from covey.types import Completion, Group, Prompt, Reward, Sampling

from ..golden.reference_masked_policy import fill_entropy, fill_kl, fill_log_probs
from ..support.builders import MASK_ID, MASKED, logprobs, make, make_masked_policy, make_policy

M = MASK_ID
INPUTS = ((5, M, 20, M, 7), (17, 3, M, M, M, 25, 31, M, 29, 12, 6), (M, 33), (1, 2, 3, M, 5, 6, 7))
DOCUMENT = Sampling(temperature=0.8, top_p=0.95)
SAMPLINGS = {
    "plain": Sampling(),
    "document": DOCUMENT,
    "top_k": Sampling(temperature=0.7, top_k=8),
    "three passes": replace(DOCUMENT, num_passes=3),
    "one step": replace(DOCUMENT, num_passes=3, likelihood="one_step"),
    "one step, plain": Sampling(num_passes=2, likelihood="one_step"),
}
Tokens = list[list[tuple[int, ...]]]


def sampled(engine: FillEngine, inputs: Sequence[Sequence[int]], sampling: Sampling, n: int = 4) -> list[Any]:
    """All inputs at the same time, each with a seed of its own."""

    async def run() -> list[Any]:
        calls = (engine.generate(ids, n, replace(sampling, seed=sum(ids))) for ids in inputs)
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())


def groups_of(inputs: Sequence[Sequence[int]], completions: Sequence[Sequence[Completion]]) -> list[Group]:
    return [
        Group(
            Prompt(f"p{index}", "test", "", {}),
            tuple(filled_rollout(ids, M, completion, Reward(0.0, {}), "") for completion in group),
            (),
        )
        for index, (ids, group) in enumerate(zip(inputs, completions, strict=True))
    ]


def recorded(groups: Sequence[Group]) -> Tensor:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return torch.tensor([v for r in rollouts for v, mine in zip(r.sampler_logprobs, r.loss_mask, strict=True) if mine])


@pytest.mark.parametrize("architecture", MASKED)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_log_probs_of_engine_and_trainer_agree_in_every_layout(architecture: str, name: str) -> None:
    policy, sampling = make_masked_policy(architecture), SAMPLINGS[name]
    groups = groups_of(INPUTS, sampled(FillEngine(policy, 16), INPUTS, sampling))
    assert float(recorded(groups).std()) > 0.1  # ten thousand times the bound below
    for packing, budget in (("shared", 10_000), ("shared", 20), ("packed", 30), ("padded", 30)):
        scored = logprobs(policy, make(groups, packing, budget).micro_batches, Scoring(sampling, 3))
        assert float((scored - recorded(groups)).abs().max()) < 1e-5


@pytest.mark.parametrize("architecture", MASKED)
def test_scores_are_the_formulas_of_the_masked_policy(architecture: str) -> None:
    """Those that the golden values check: log-probs, entropy and exact KL over masked positions."""
    policy, other = make_masked_policy(architecture), make_masked_policy(architecture, seed=4)
    sampling = Sampling(temperature=0.8)
    groups = groups_of(INPUTS, sampled(FillEngine(policy, 16), INPUTS, sampling))
    reference = Reference(other, None)
    for ids, group in zip(INPUTS, groups, strict=True):
        (batch,) = make([group]).micro_batches
        with torch.no_grad():
            scores = score_tokens(policy, batch, Scoring(sampling, 0), None, {"r": exact_kl(reference)})
        place = (torch.tensor([ids]), torch.arange(len(ids))[None], WHOLE)
        with torch.no_grad():
            logits, ref_logits = (p.logits(*place)[None] for p in (policy, other))
        positions = torch.tensor([[index for index, token_id in enumerate(ids) if token_id == M]])
        samples = torch.tensor([[[r.target_ids[p] for p in positions[0].tolist()] for r in group.rollouts]])
        expected = fill_log_probs(logits, positions, samples, temperature=0.8)
        torch.testing.assert_close(scores.logprob_L, expected.flatten(), rtol=0, atol=1e-5)
        kl, entropy = (
            fill_kl(logits, ref_logits, positions, temperature=0.8),
            fill_entropy(logits, positions, temperature=0.8),
        )
        torch.testing.assert_close(scores.compared["r"].value_L, kl.repeat(4, 1).flatten(), rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.entropy_L, entropy.repeat(4, 1).flatten(), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------ the same seed


def tokens(found: Sequence[Sequence[Completion]]) -> Tokens:
    return [[completion.token_ids for completion in group] for group in found]


@pytest.mark.parametrize("name", ["document", "three passes"])
def test_the_same_seed_gives_the_same_fills_beside_any_others(name: str) -> None:
    policy, sampling = make_masked_policy("bert", torch.float64), SAMPLINGS[name]
    expected = [tokens(sampled(FillEngine(policy, 64), [ids], sampling))[0] for ids in INPUTS]
    assert tokens(sampled(FillEngine(policy, 64), INPUTS, sampling)) == expected
    assert tokens(sampled(FillEngine(policy, 1), INPUTS, sampling)) == expected
    assert tokens(sampled(FillEngine(policy, 64), INPUTS[::-1], sampling)) == expected[::-1]
    assert tokens(sampled(FillEngine(policy, 64), INPUTS, sampling, n=2)) == [group[:2] for group in expected]
    assert len({fill for group in expected for fill in group}) > 8


@pytest.mark.parametrize("name", ["plain", "three passes"])
def test_later_samples_of_a_group_are_the_ones_that_it_would_have_had(name: str) -> None:
    engine = FillEngine(make_masked_policy("bert", torch.float64), 16)
    whole = sampled(engine, INPUTS, SAMPLINGS[name], n=5)
    parts = [
        sampled(engine, INPUTS, replace(SAMPLINGS[name], first_sample=first), n=n) for first, n in ((0, 2), (2, 3))
    ]
    tokens = [[[one.token_ids for one in group] for group in groups] for groups in (whole, *parts)]
    assert tokens[0] == [[*first, *rest] for first, rest in zip(tokens[1], tokens[2], strict=True)]
    assert tokens[1] != [group[:2] for group in tokens[2]]


def test_what_is_certain_is_what_the_sampling_is_certain_of() -> None:
    """At temperature 1 the first gap is surer, at 4 the second, of whose tokens two are likely."""
    peaked, split = [3.0, 0.0, 0.0, 0.0, 0.0], [3.0, 2.5, -9.0, -9.0, -9.0]
    for temperature, surest in ((1.0, 1), (4.0, 2)):
        sampling = Sampling(temperature=temperature, num_passes=2)
        request = FillRequest((0, M, M), [1, 2], 1, sampling, 0, asyncio.Future(loop=asyncio.new_event_loop()))
        (fill,) = request.fills()
        read = Read(torch.tensor([peaked, split]), {((0, M, M), 1): 0, ((0, M, M), 2): 1})
        assert _most_confident(read, fill, 0) == [surest]


def test_another_seed_gives_other_fills() -> None:
    policy = make_masked_policy("bert")
    engine = FillEngine(policy, 64)

    async def run(seed: int) -> list[Completion]:
        return await engine.generate(INPUTS[1], 4, replace(DOCUMENT, seed=seed))

    first, again, other = (asyncio.run(run(seed)) for seed in (1, 1, 2))
    assert tokens([first]) == tokens([again]) != tokens([other])


# ------------------------------------------------------------------------------------------------ passes


def passes_of(policy: Policy, call: Any) -> list[tuple[int, ...]]:
    """The shape of each pass through the model that `call` makes."""
    shapes: list[tuple[int, ...]] = []
    handle = policy.causal_lm.base_model.register_forward_pre_hook(
        lambda module, given, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    call()
    handle.remove()
    return shapes


def test_one_pass_over_each_input_serves_all_fills_of_all_calls() -> None:
    policy = make_masked_policy("bert")
    engine = FillEngine(policy, 8 * len(INPUTS))
    shapes = passes_of(policy, lambda: sampled(engine, INPUTS, DOCUMENT, n=8))
    assert shapes == [(1, sum(map(len, INPUTS)))]
    assert engine.take_stats().sampled_tokens == 8 * (2 + 4 + 1 + 1)


def test_several_passes_fill_equal_shares_the_most_certain_first() -> None:
    policy = make_masked_policy("bert")
    ids = INPUTS[1]
    ((fill,),) = sampled(FillEngine(policy, 64), [ids], replace(DOCUMENT, num_passes=2, temperature=1.0), n=1)
    assert sorted(fill.passes) == [0, 0, 1, 1]
    place = (torch.tensor([ids]), torch.arange(len(ids))[None], WHOLE)
    with torch.no_grad():
        certainty = policy.logits(*place).softmax(-1).amax(-1)
    masked = [index for index, token_id in enumerate(ids) if token_id == M]
    order = sorted(range(4), key=lambda index: -float(certainty[masked[index]]))
    assert {index for index, number in enumerate(fill.passes) if number == 0} == set(order[:2])


def test_more_passes_than_gaps_fill_one_token_each() -> None:
    ((fill,),) = sampled(FillEngine(make_masked_policy("bert"), 64), [INPUTS[0]], Sampling(num_passes=9), n=1)
    assert sorted(fill.passes) == [0, 1]


def test_one_step_likelihood_reads_the_first_pass_alone() -> None:
    policy = make_masked_policy("bert")
    sampling = Sampling(num_passes=3, likelihood="one_step")
    found = sampled(FillEngine(policy, 64), INPUTS, sampling)
    exact = sampled(FillEngine(policy, 64), INPUTS, replace(sampling, likelihood="trajectory"))
    assert tokens(found) == tokens(exact)
    assert all(fill.passes == () for group in found for fill in group)
    rollouts = [rollout for group in groups_of(INPUTS, found) for rollout in group.rollouts]
    assert all(len(rollout.input_ids) == rollout.input_length for rollout in rollouts)
    gaps = [
        max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
        for one, other in zip(found[1], exact[1], strict=True)
    ]
    assert max(gaps) > 0.05


def test_fills_that_draw_the_mask_token_continue_beside_equal_inputs() -> None:
    policy = make_masked_policy("bert")
    torch.nn.init.constant_(policy.causal_lm.cls.predictions.decoder.bias[M : M + 1], 100.0)
    engine = FillEngine(policy, 64)

    async def run() -> list[list[Completion]]:
        calls = (engine.generate((M, M, M), 1, Sampling(num_passes=passes)) for passes in (3, 2))
        return list(await asyncio.gather(*calls))

    assert [fill.passes for (fill,) in asyncio.run(run())] == [(0, 1, 2), (0, 0, 1)]


# ------------------------------------------------------------------------------------------------ edges


def test_an_input_without_gaps_has_empty_fills() -> None:
    engine = FillEngine(make_masked_policy("bert"), 64)
    assert [completion.token_ids for completion in sampled(engine, [(5, 6, 7)], DOCUMENT, n=2)[0]] == [(), ()]


def test_greedy_takes_the_most_likely_token_of_each_gap() -> None:
    policy = make_masked_policy("roberta")
    (first, second) = sampled(FillEngine(policy, 64), [INPUTS[1]], Sampling(temperature=0.0), n=2)[0]
    ids = INPUTS[1]
    with torch.no_grad():
        logits = policy.logits(torch.tensor([ids]), torch.arange(len(ids))[None], WHOLE)
    best = [int(logits[index].argmax()) for index, token_id in enumerate(ids) if token_id == M]
    assert list(first.token_ids) == list(second.token_ids) == best


@pytest.mark.parametrize(
    ("ids", "n", "sampling", "line"),
    [
        ((M,), 0, DOCUMENT, "n must be >= 1, got 0"),
        ((), 1, DOCUMENT, "a prompt must hold at least one token, got none"),
        ((M,) * 5, 1, Sampling(max_tokens=4), "max_tokens must be >= the 5 masked tokens, got 4"),
        ((M,) * 200, 1, DOCUMENT, "an input of 200 tokens, the policy has 128 positions"),
    ],
)
def test_what_cannot_be_filled_is_one_line(ids: tuple[int, ...], n: int, sampling: Sampling, line: str) -> None:
    engine = FillEngine(make_masked_policy("bert"), 64)
    with pytest.raises(ValueError) as refused:
        asyncio.run(engine.generate(ids, n, sampling))
    assert str(refused.value) == line


def test_a_policy_that_continues_its_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^engine\.name=fill needs model\.kind=masked, got model.kind=causal"):
        FillEngine(make_policy("gpt2"), 64)


def test_calls_that_wait_are_filled_with_the_weights_that_come() -> None:
    policy = make_masked_policy("bert")
    engine = OwnWeightsFillEngine(policy, 8)

    async def run() -> FillRequest:
        request = engine._request(INPUTS[0], 2, Sampling(), asyncio.get_running_loop().create_future())
        engine._waiting.append(request)
        await engine.update(make_weight_set(policy, 3), "wait")
        return request

    request = asyncio.run(run())
    assert (request.version, engine.version) == (3, 3)


def test_a_failure_reaches_every_waiting_call_and_the_engine_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_masked_policy("bert")
    engine = FillEngine(policy, 4)

    async def run() -> list[Any]:
        calls = (engine.generate(ids, 4, DOCUMENT) for ids in INPUTS)
        return list(await asyncio.gather(*calls, return_exceptions=True))

    with monkeypatch.context() as patch:
        patch.setattr("covey.engine.fill.fill_in", lambda policy, fills: 1 / 0)
        assert all(isinstance(found, ZeroDivisionError) for found in asyncio.run(run()))
    assert [len(found) for found in asyncio.run(run())] == [4, 4, 4, 4]
