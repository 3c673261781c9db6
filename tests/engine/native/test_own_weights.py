"""The native engine on weights of its own: every token is of the version that it is labelled with."""

import asyncio
import copy
import math
import random
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from covey.cluster.wire import copy_arrays, pack, unpack
from covey.engine.base import PushRefused, UpdateMode, WeightSet, digest_of
from covey.engine.native.cache import CacheBlock
from covey.engine.native.layouts import PrefillLayout
from covey.engine.native.own_weights import ALONE, OwnWeightsEngine
from covey.engine.native.rows import SamplingRequest
from covey.engine.native.runner import Runner, encode
from covey.engine.weights import defect, make_weight_set, probe_logprobs, trained_tensors
from covey.policy.policy import Policy
from covey.types import Completion, Sampling

from ..tiny import plain_logprobs, tiny_policy

PROMPTS = [[5, 9, 200], [17, 3, 44, 101, 7, 250, 31, 30, 29, 12, 64], [99], [1, 2, 3, 4, 5, 6, 7]]
SAMPLING = Sampling(temperature=0.8, max_tokens=24, seed=4)
ROOM = 1 << 26


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the event loop after each step, so that a push comes at the token it is meant for."""
    monkeypatch.setattr("covey.engine.native.engine.TURN_SECONDS", 0.0)


def moved(policy: Policy, version: int) -> tuple[Policy, WeightSet]:
    """Return the policy with weights that noise has moved, far enough to be seen in every log-prob, and the set."""
    other = replace(policy, model=copy.deepcopy(policy.model))
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for tensor in trained_tensors(other).values():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
    return other, make_weight_set(other, version)


class Pushes:
    """Samples while weights are pushed after so many turns of the engine."""

    def __init__(self, policy: Policy, how: UpdateMode, max_rows: int = 64, kernels: str = "auto") -> None:
        self.policies = {0: copy.deepcopy(policy)}
        self.engine = OwnWeightsEngine(policy, ROOM, max_rows, kernels)
        self._how: UpdateMode = how

    def sample(self, n: int, at: Sequence[int]) -> list[list[Completion]]:
        """Sample n completions of each prompt, pushing a version when so many tokens were sampled."""

        async def push() -> None:
            for version, tokens in enumerate(at, start=1):
                while self.engine._stats.sampled_tokens < tokens:
                    await asyncio.sleep(0)
                self.policies[version], weights = moved(self.policies[0], version)
                await self.engine.update(weights, self._how)

        async def run() -> list[list[Completion]]:
            calls = [self.engine.generate(ids, n, SAMPLING) for ids in PROMPTS]
            *groups, _ = await asyncio.gather(*calls, push())
            return groups  # type: ignore[return-value]

        return asyncio.run(run())

    def largest_gap(self, groups: list[list[Completion]]) -> float:
        """Return the most nats between a token's log-prob and that of its version on the whole prefix."""
        gaps = [0.0]
        for prompt_ids, group in zip(PROMPTS, groups, strict=True):
            for completion in group:
                for version, start, end in spans_of(completion):
                    model = self.policies[version].model.eval()
                    wanted = plain_logprobs(model, prompt_ids, completion, SAMPLING)
                    found = completion.logprobs[start:end]
                    gaps += [abs(a - float(b)) for a, b in zip(found, wanted[start:end], strict=True)]
        return max(gaps)


def spans_of(completion: Completion) -> list[tuple[int, int, int]]:
    if not completion.spans:
        return [(completion.policy_version, 0, len(completion.token_ids))]
    return [(span.version, span.start, span.end) for span in completion.spans]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral-window", "gpt2", "qwen3_5_text", "falcon_h1"])
def test_every_token_is_of_the_version_of_its_span(architecture: str, kernels: str) -> None:
    pushes = Pushes(tiny_policy(architecture), "keep", kernels=kernels)
    groups = pushes.sample(3, at=[30, 60, 130])
    versions = {version for group in groups for c in group for version, _, _ in spans_of(c)}
    assert versions == {0, 1, 2, 3}
    assert any(len(c.spans) == 4 for group in groups for c in group)
    assert pushes.largest_gap(groups) < 1e-4


def test_spans_cover_each_completion_without_a_gap() -> None:
    for group in Pushes(tiny_policy("llama"), "keep").sample(3, at=[30, 60, 61]):
        for completion in group:
            spans = spans_of(completion)
            assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
            assert spans[-1][2] == len(completion.token_ids)
            assert completion.policy_version == spans[0][0] == min(version for version, _, _ in spans)
            assert all(start < end for _, start, end in spans)


def test_rows_that_wait_for_room_begin_on_the_new_version() -> None:
    pushes = Pushes(tiny_policy("llama"), "keep", max_rows=4)
    groups = pushes.sample(3, at=[20])
    assert {c.policy_version for group in groups for c in group} == {0, 1}
    assert pushes.largest_gap(groups) < 1e-4


@pytest.mark.parametrize("how", ["wait", "abort"])
def test_no_completion_mixes_versions_unless_it_is_kept(how: UpdateMode) -> None:
    pushes = Pushes(tiny_policy("qwen2"), how, max_rows=5)
    groups = pushes.sample(3, at=[20, 150])
    assert all(not completion.spans for group in groups for completion in group)
    assert len({c.policy_version for group in groups for c in group}) > 1
    assert pushes.largest_gap(groups) < 1e-4


def test_waiting_finishes_running_completions_on_the_old_weights() -> None:
    groups = Pushes(tiny_policy("qwen2"), "wait").sample(2, at=[40])
    assert {c.policy_version for group in groups for c in group} == {0}


def test_a_push_that_is_given_up_while_it_waits_lets_others_begin_again() -> None:
    policy = tiny_policy("qwen2")
    engine, (_, weights) = OwnWeightsEngine(policy, ROOM, 64), moved(policy, 1)

    async def run() -> list[Completion]:
        sampling = asyncio.create_task(engine.generate(PROMPTS[0], 2, SAMPLING))
        while engine._stats.sampled_tokens < 6:
            await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.0):
                await engine.update(weights, "wait")
        async with asyncio.timeout(10):
            return [*await sampling, *await engine.generate(PROMPTS[1], 2, SAMPLING)]

    assert {completion.policy_version for completion in asyncio.run(run())} == {0}


def test_aborting_resamples_running_completions() -> None:
    pushes = Pushes(tiny_policy("qwen2"), "abort")
    groups = pushes.sample(2, at=[9])
    alone = OwnWeightsEngine(pushes.policies[1], ROOM, 64)

    async def again() -> list[list[Completion]]:
        return list(await asyncio.gather(*(alone.generate(ids, 2, SAMPLING) for ids in PROMPTS)))

    again_groups = asyncio.run(again())
    assert {c.policy_version for group in groups for c in group} == {1}
    assert [[c.token_ids for c in g] for g in groups] == [[c.token_ids for c in g] for g in again_groups]


def refused(weights: WeightSet, policy: Policy) -> str:
    engine = OwnWeightsEngine(policy, ROOM, 8)
    before = {name: tensor.clone() for name, tensor in trained_tensors(policy).items()}
    read = probe_logprobs(engine._policy, PROMPTS[0])
    with pytest.raises(PushRefused) as error:
        asyncio.run(engine.update(weights, "keep"))
    assert engine.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained_tensors(policy).items())
    assert probe_logprobs(engine._policy, PROMPTS[0]) == read
    return str(error.value)


def test_part_of_the_weights_is_refused_and_the_old_version_stays() -> None:
    policy = tiny_policy("llama")
    _, weights = moved(policy, 1)
    part = dict(list(weights.tensors.items())[:3])
    assert "tensors of the engine's are missing" in refused(
        replace(weights, tensors=part, digest=digest_of(part)), policy
    )


def test_a_tensor_of_another_shape_is_refused_and_the_old_version_stays() -> None:
    policy = tiny_policy("llama")
    _, weights = moved(policy, 1)
    name = next(name for name, tensor in weights.tensors.items() if tensor.dim() == 2)
    bent = {**weights.tensors, name: weights.tensors[name][:-1]}
    assert "shape" in refused(replace(weights, tensors=bent, digest=digest_of(bent)), policy)


def test_weights_that_changed_on_their_way_are_refused() -> None:
    policy = tiny_policy("llama")
    _, weights = moved(policy, 1)
    next(iter(weights.tensors.values())).view(-1)[0].add_(1e-3)
    assert "digest" in refused(weights, policy)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    policy = tiny_policy("llama")
    _, weights = moved(policy, 1)
    next(iter(weights.tensors.values())).view(-1)[0] = value
    assert "not finite" in refused(replace(weights, digest=digest_of(weights.tensors)), policy)


def test_weights_that_the_probe_does_not_prove_are_put_back() -> None:
    policy = tiny_policy("llama")
    _, first = moved(policy, 1)
    _, second = moved(policy, 2)
    assert "probe" in refused(replace(first, probe=second.probe), policy)


def pushed_ahead_of_its_proof(weights: WeightSet, logprobs: Sequence[float] | None) -> tuple[OwnWeightsEngine, str]:
    """Push weights whose proof follows once the engine waits for it, and sample meanwhile; None cuts the push off.

    Returns the engine and what it refused.
    """
    engine = OwnWeightsEngine(tiny_policy("llama"), ROOM, 64)
    coming: Future[tuple[float, ...]] = Future()

    async def run() -> str:
        sampling = asyncio.create_task(engine.generate(PROMPTS[0], 2, SAMPLING))
        while engine._stats.sampled_tokens < 6:
            await asyncio.sleep(0)
        push = asyncio.create_task(
            engine.update(replace(weights, probe=replace(weights.probe, logprobs=coming)), "keep")
        )
        await asyncio.sleep(0)
        # Nothing is sampled on weights that are not proved
        before = engine._stats.sampled_tokens
        for _ in range(20):
            await asyncio.sleep(0)
        assert (engine._stats.sampled_tokens, engine.version, push.done()) == (before, 0, False)
        # The proof comes, or who waits for it gives up
        if logprobs is None:
            push.cancel()
        else:
            coming.set_result(tuple(logprobs))
        (found,) = await asyncio.gather(push, return_exceptions=True)
        assert len(await sampling) == 2
        return str(found) if isinstance(found, PushRefused) else ""

    return engine, asyncio.run(run())


def test_nothing_is_sampled_between_the_weights_and_their_proof() -> None:
    _, weights = moved(tiny_policy("llama"), 1)
    assert not isinstance(weights.probe.logprobs, Future)
    engine, refusal = pushed_ahead_of_its_proof(weights, weights.probe.logprobs)
    assert (refusal, engine.version) == ("", 1)
    assert digest_of(trained_tensors(engine._trained)) == weights.digest


def test_a_proof_that_is_another_or_never_comes_leaves_the_old_weights_whole() -> None:
    policy = tiny_policy("llama")
    _, weights = moved(policy, 1)
    of_others = moved(policy, 2)[1].probe.logprobs
    assert not isinstance(of_others, Future)
    old = digest_of(trained_tensors(policy))
    for logprobs, said in ((of_others, "probe"), (None, "")):
        engine, refusal = pushed_ahead_of_its_proof(weights, logprobs)
        assert said in refusal
        assert engine.version == 0
        assert digest_of(trained_tensors(engine._trained)) == old


def test_a_row_has_the_same_bits_alone_and_beside_others_that_come_and_go() -> None:
    policy = tiny_policy("llama")
    together = OwnWeightsEngine(policy, ROOM, 5)

    async def of(engine: OwnWeightsEngine, prompts: Sequence[Sequence[int]]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(engine.generate(ids, 3, SAMPLING) for ids in prompts)))

    groups = asyncio.run(of(together, PROMPTS))
    for ids, group in zip(PROMPTS, groups, strict=True):
        assert asyncio.run(of(OwnWeightsEngine(policy, ROOM, 64), [ids]))[0] == group


def many_prompts(num: int) -> list[list[int]]:
    """Prompts of all lengths that the policy has room for, some of them twice."""
    chance = random.Random(num)
    lengths = [chance.choice([1, 2, 3, 3, 3, chance.randint(4, 96)]) for _ in range(num)]
    return [[chance.randrange(250) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("num", [2, 40])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral-window", "gpt2"])
def test_a_completion_has_the_same_bits_beside_any_encoded_prompts(architecture: str, num: int) -> None:
    policy, prompts = tiny_policy(architecture), many_prompts(num)
    # Passes of torch decode rows together: of these, what the prompt alone decides
    max_tokens = 1 if architecture == "gpt2" else 5

    engine = OwnWeightsEngine(policy, ROOM, 200)

    async def of(group: Sequence[Sequence[int]]) -> list[list[Completion]]:
        sampling = replace(SAMPLING, max_tokens=max_tokens)
        return list(await asyncio.gather(*(engine.generate(ids, 2, sampling) for ids in group)))

    alone = [asyncio.run(of([ids]))[0] for ids in prompts]
    assert asyncio.run(of(prompts)) == alone
    assert asyncio.run(of(prompts[::-1])) == alone[::-1]


@pytest.mark.parametrize(("architecture", "num_passes"), [("llama", 1), ("mistral-window", 1), ("gpt2", 4)])
def test_prompts_share_a_pass_where_none_sees_the_others(
    architecture: str, num_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OwnWeightsEngine(tiny_policy(architecture), ROOM, 64)
    passes: list[int] = []
    encode = Runner._encode

    def counted(self: Runner, prompts: Sequence[SamplingRequest]) -> torch.Tensor:
        passes.append(len(prompts))
        return encode(self, prompts)

    monkeypatch.setattr(Runner, "_encode", counted)

    async def run() -> None:
        await asyncio.gather(*(engine.generate(ids, 2, SAMPLING) for ids in PROMPTS))

    asyncio.run(run())
    assert passes == [len(PROMPTS) // num_passes] * num_passes


@pytest.mark.parametrize("place", [0, 1])
def test_a_processor_on_which_companions_change_a_bit_encodes_each_prompt_alone(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded_otherwise(
        policy: Policy, layout: type[PrefillLayout], block: CacheBlock, first: int, prompts: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        logits_NV = encode(policy, layout, block, first, prompts)
        touched = (logits_NV, block.keys[-1])[place]
        touched.copy_(torch.nextafter(touched, torch.tensor(torch.inf)) if len(prompts) > 1 else touched)
        return logits_NV

    policy = tiny_policy("llama")
    assert OwnWeightsEngine(policy, ROOM, 64)._limits.max_prefill > ALONE
    monkeypatch.setattr("covey.engine.native.own_weights.encode", rounded_otherwise)
    assert OwnWeightsEngine(policy, ROOM, 64)._limits.max_prefill == ALONE


def test_the_version_that_is_sampled_on_may_come_again_and_older_ones_not() -> None:
    weights = make_weight_set(tiny_policy("llama"), 3)
    assert [defect(weights, version) for version in (2, 3, 4)] == [
        "",
        "",
        "it is older than version 4, which is sampled on",
    ]


def test_a_digest_tells_every_change_of_names_types_shapes_and_bytes() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "c": torch.tensor(1.0)}
    digest = digest_of(tensors)
    assert digest_of(dict(reversed(tensors.items()))) == digest
    bent = tensors["a"].clone()
    bent.view(torch.uint8)[1, 7] ^= 1  # one bit
    others = (
        {**tensors, "a": bent},
        {**tensors, "a": tensors["a"].reshape(3, 2)},
        {**tensors, "a": tensors["a"].view(torch.int32)},
        {"A": tensors["a"], "b": tensors["b"], "c": tensors["c"]},
        {"a": tensors["a"], "c": tensors["c"]},
        {"a": tensors["a"], "b": tensors["c"], "c": tensors["b"]},
    )
    assert len({digest, *map(digest_of, others)}) == 7


def test_weights_without_a_copy_are_those_of_the_policy_and_others_stay() -> None:
    policy = tiny_policy("llama")
    kept, shared = make_weight_set(policy, 1), make_weight_set(policy, 1, copy=False)
    assert kept.digest == shared.digest
    packed = copy_arrays(pack(shared))
    with torch.no_grad():
        next(iter(trained_tensors(policy).values())).add_(1)
    assert digest_of(kept.tensors) == kept.digest == digest_of(unpack(packed).tensors)
    assert digest_of(shared.tensors) != shared.digest
