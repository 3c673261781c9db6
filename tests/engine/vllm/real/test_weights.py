"""Real vLLM: its log-probs are those of transformers for the weights pushed last, of every token by its version."""

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from covey.engine.base import EngineLost, PushRefused, digest_of
from covey.engine.vllm.engine import VLLMEngine
from covey.engine.weights import make_weight_set
from covey.policy.policy import Policy
from covey.types import Completion, Sampling

from .tiny_served import PROMPT, gap, gaps, sample, serving, tiny_policy, train_a_little

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SHAPES = [(name, tied) for name in ("llama", "qwen2", "qwen3") for tied in (False, True)]
DISTRIBUTIONS = [
    Sampling(max_tokens=24, seed=3),
    Sampling(max_tokens=24, seed=3, temperature=0.7),
    Sampling(max_tokens=24, seed=3, top_k=20),
    Sampling(max_tokens=24, seed=3, top_p=0.8),
    Sampling(max_tokens=24, seed=3, min_p=0.05),
    Sampling(max_tokens=24, seed=3, temperature=1.3, top_k=50, top_p=0.9),
]
Served = tuple[Policy, VLLMEngine]


@pytest.fixture(scope="module", params=SHAPES, ids=[f"{name}-{'tied' if tied else 'untied'}" for name, tied in SHAPES])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    name, tied = request.param
    policy = tiny_policy(name, tied=tied)
    with serving(policy) as engine:
        yield policy, engine


def push(engine: VLLMEngine, policy: Policy, version: int) -> None:
    asyncio.run(engine.update(make_weight_set(policy, version), "keep"))


def test_log_probs_are_those_of_transformers_before_and_after_a_push(served: Served) -> None:
    policy, engine = served
    for version in (engine.version, engine.version + 1):
        if version > engine.version:
            train_a_little(policy, seed=version)
            push(engine, policy, version)
        for sampling in DISTRIBUTIONS:
            completions = sample(engine, sampling)
            assert gap(policy, completions, sampling) < 1e-4
            assert [completion.policy_version for completion in completions] == [version] * 4
            assert len({completion.token_ids for completion in completions}) == 4


def test_the_same_seed_gives_the_same_completions_and_stop_tokens_end_them(served: Served) -> None:
    _, engine = served
    sampling = Sampling(max_tokens=24, seed=5)
    first = sample(engine, sampling)
    assert [c.token_ids for c in sample(engine, sampling)] == [c.token_ids for c in first]
    assert all(c.finish_reason == "length" and len(c.token_ids) == 24 for c in first)


def test_each_token_of_20_pushes_in_flight_is_of_the_version_of_its_span(served: Served) -> None:
    policy, engine = served
    first, sampling = engine.version, Sampling(max_tokens=400)
    policies = {first: copy.deepcopy(policy)}

    async def run() -> list[Completion]:
        done: list[Completion] = []
        under_way = [asyncio.create_task(engine.generate(PROMPT, 1, replace(sampling, seed=i))) for i in range(4)]
        for version in range(first + 1, first + 21):
            train_a_little(policy, seed=version, size=0.01)
            policies[version] = copy.deepcopy(policy)
            await engine.update(make_weight_set(policy, version), "keep")
            await asyncio.sleep(0.02)
            for place, task in enumerate(under_way):
                if task.done():
                    done += task.result()
                    again = replace(sampling, seed=100 * version + place)
                    under_way[place] = asyncio.create_task(engine.generate(PROMPT, 1, again))
        return done + [completion for task in under_way for completion in await task]

    completions = asyncio.run(run())
    spans = [(completion, span) for completion in completions for span in completion.spans]
    assert len({span.version for _, span in spans}) >= 15
    for completion, span in spans:
        assert float(gaps(policies[span.version], completion, sampling)[span.start : span.end].max()) < 1e-4
    crossed = [completion for completion in completions if completion.spans]
    assert crossed
    for completion in crossed:  # the older weights say something else of the later tokens
        old, last = policies[completion.spans[0].version], completion.spans[-1]
        assert float(gaps(old, completion, sampling)[last.start :].max()) > 1e-3
    assert engine.version == first + 20


def test_what_is_not_the_whole_set_is_refused_and_the_old_version_stays_whole(served: Served) -> None:
    policy, engine = served
    version, sampling = engine.version, Sampling(max_tokens=16, seed=9)
    whole = make_weight_set(policy, version + 1)
    part = dict(list(whole.tensors.items())[:-2])
    name = next(name for name in whole.tensors if name.endswith("mlp.up_proj.weight"))
    wrong = dict(whole.tensors) | {name: torch.zeros(3, 128)}
    no_numbers = dict(whole.tensors) | {name: torch.full_like(whole.tensors[name], float("nan"))}
    for tensors, line in (
        (part, "2 tensors of the engine's are missing"),
        (wrong, f"{name} has the shape"),
        (no_numbers, f"{name} holds values that are not finite"),
    ):
        with pytest.raises(PushRefused, match=line):
            asyncio.run(engine.update(replace(whole, tensors=tensors, digest=digest_of(tensors)), "keep"))
    with pytest.raises(PushRefused, match=f"it is older than version {version}"):
        push(engine, policy, version - 1)
    other = make_weight_set(
        tiny_policy("llama" if "qwen" in policy.causal_lm.config.model_type else "qwen3", tied=False), 99
    )
    with pytest.raises(PushRefused, match="are not the engine's"):
        asyncio.run(engine.update(other, "keep"))
    with pytest.raises(PushRefused, match="changed on its way"):
        asyncio.run(engine.update(replace(whole, digest="0" * 32), "keep"))
    assert engine.version == version
    assert gap(policy, sample(engine, sampling), sampling) < 1e-4
    push(engine, policy, version + 1)


@pytest.mark.parametrize("how", ["wait", "abort"])
def test_running_completions_end_before_a_push_or_restart_after_it(served: Served, how: str) -> None:
    policy, engine = served
    old, sampling, version = copy.deepcopy(policy), Sampling(max_tokens=200, seed=4), engine.version

    async def run() -> list[Completion]:
        under_way = asyncio.create_task(engine.generate(PROMPT, 2, sampling))
        await asyncio.sleep(0.1)
        train_a_little(policy, seed=77)
        await engine.update(make_weight_set(policy, version + 1), how)  # type: ignore[arg-type]
        return await under_way

    completions = asyncio.run(run())
    assert all(completion.spans == () for completion in completions)
    assert {completion.policy_version for completion in completions} == {version if how == "wait" else version + 1}
    assert gap(old if how == "wait" else policy, completions, sampling) < 1e-4


def test_weights_that_do_not_give_the_probe_lose_the_engine(served: Served) -> None:
    policy, engine = served  # the last test of each engine: afterwards it is lost
    whole = make_weight_set(policy, engine.version + 1)
    train_a_little(policy, seed=78)
    with pytest.raises(
        EngineLost, match=r"differs from the trainer's probe by up to .* rounding explains 0\.0001 and 1e-05"
    ):
        asyncio.run(engine.update(replace(whole, probe=make_weight_set(policy, 0).probe), "keep"))
    with pytest.raises(EngineLost, match="differs from the trainer"):
        sample(engine, Sampling(max_tokens=4))
