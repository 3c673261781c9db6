"""The native engine against a plain transformers forward, and under load."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.engine.native.engine import NativeEngine
from covey.policy.policy import Policy
from covey.policy.sampling import draw, filtered_logprobs, random_uniform, row_key
from covey.types import Completion, Sampling

from ..tiny import MAX_LENGTH, TOKENIZER, plain_logprobs, tiny_model, tiny_policy

PROMPTS = [[5, 9, 200], [17, 3, 44, 101, 7, 250, 31, 30, 29, 12, 64], [99], [1, 2, 3, 4, 5, 6, 7]]
GENEROUS = 1 << 26
SETTINGS = {
    "plain": [Sampling(max_tokens=12)] * 4,
    "top_p": [Sampling(temperature=0.7, top_p=0.9, max_tokens=12)] * 4,
    "top_k": [Sampling(temperature=0.7, top_k=5, max_tokens=12)] * 4,
    "mixed": [
        Sampling(temperature=0.7, top_p=0.9, max_tokens=9),
        Sampling(top_k=3, max_tokens=14, seed=1),
        Sampling(temperature=0, max_tokens=5),
        Sampling(temperature=1.5, min_p=0.05, max_tokens=12, seed=2),
    ],
}
ARCHITECTURES = ("llama", "qwen2", "qwen2-window", "qwen3", "mistral", "mistral-window", "gpt2")


def sampled(
    engine: NativeEngine, prompts: Sequence[Sequence[int]], n: int, samplings: Sequence[Sampling]
) -> list[list[Completion]]:
    """All prompts at the same time."""

    async def run() -> list[list[Completion]]:
        calls = [engine.generate(ids, n, sampling) for ids, sampling in zip(prompts, samplings, strict=True)]
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())


def one(engine: NativeEngine, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
    return sampled(engine, [prompt], n, [sampling])[0]


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_are_those_of_a_plain_forward(architecture: str, settings: str) -> None:
    engine = NativeEngine(tiny_policy(architecture), GENEROUS, max_rows=64)
    samplings = SETTINGS[settings]
    groups = sampled(engine, PROMPTS, 3, samplings)
    plain = tiny_model(architecture, attention="eager").eval()
    for prompt, group, sampling in zip(PROMPTS, groups, samplings, strict=True):
        for completion in group:
            assert len(completion.token_ids) == sampling.max_tokens
            expected = plain_logprobs(plain, prompt, completion, sampling)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("architecture", ["qwen2-window", "mistral-window"])
def test_a_completion_that_outgrows_the_window_after_a_short_prompt_sees_no_further(architecture: str) -> None:
    sampling = Sampling(max_tokens=12)
    completion = one(NativeEngine(tiny_policy(architecture), GENEROUS, 8), [5, 9], 1, sampling)[0]
    expected = plain_logprobs(tiny_model(architecture, attention="eager").eval(), [5, 9], completion, sampling)
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_each_token_is_drawn_with_the_random_number_of_its_row_and_position() -> None:
    sampling = Sampling(temperature=0.8, max_tokens=10, seed=42)
    completions = one(NativeEngine(tiny_policy("gpt2", torch.float64), GENEROUS, 8), PROMPTS[1], 3, sampling)
    plain = tiny_model("gpt2", torch.float64, attention="eager").eval()
    for index, completion in enumerate(completions):
        with torch.no_grad():
            logits_TV = plain(torch.tensor([[*PROMPTS[1], *completion.token_ids]])).logits[0, len(PROMPTS[1]) - 1 : -1]
        uniform_T = random_uniform(torch.full((10,), row_key(42, index)), torch.arange(10))
        assert completion.token_ids == tuple(draw(filtered_logprobs(logits_TV, 0.8), uniform_T)[0].tolist())


def test_greedy_takes_the_most_likely_token_at_every_position() -> None:
    prompt, sampling = PROMPTS[0], Sampling(temperature=0, max_tokens=20)
    completion = one(NativeEngine(tiny_policy("llama"), GENEROUS, 8), prompt, 1, sampling)[0]
    plain = tiny_model("llama", attention="sdpa").eval()
    with torch.no_grad():
        logits_TV = plain(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
    assert completion.token_ids == tuple(logits_TV.argmax(-1).tolist())
    assert completion.logprobs == pytest.approx(filtered_logprobs(logits_TV).amax(-1).tolist(), abs=1e-4)


@pytest.mark.long
def test_rows_admitted_in_waves_have_the_log_probs_of_a_plain_forward() -> None:
    engine = NativeEngine(tiny_policy("qwen2-window", stop_ids=range(0, 260, 9)), GENEROUS, max_rows=5)
    samplings = [Sampling(max_tokens=20, seed=seed) for seed in range(4)]
    groups = sampled(engine, PROMPTS, 7, samplings)
    assert engine.take_stats().peak_rows == 5
    plain = tiny_model("qwen2-window", attention="eager").eval()
    for prompt, group, sampling in zip(PROMPTS, groups, samplings, strict=True):
        for completion in group:
            expected = plain_logprobs(plain, prompt, completion, sampling)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_lora_policy_is_sampled_with_its_adapters() -> None:
    base = tiny_policy("qwen2")
    adapted = get_peft_model(base.causal_lm, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    policy = Policy(model=adapted, tokenizer=base.tokenizer, precision=torch.float32, head_is_linear=True)
    sampling = Sampling(max_tokens=10)
    completion = one(NativeEngine(policy, GENEROUS, 8), PROMPTS[1], 1, sampling)[0]
    merged = adapted.merge_and_unload().eval()
    merged.set_attn_implementation("eager")
    expected = plain_logprobs(merged, PROMPTS[1], completion, sampling)
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gpt2"])
def test_bfloat16_autocast_stays_near_a_plain_forward_under_autocast(architecture: str) -> None:
    base = tiny_policy(architecture)
    policy = Policy(model=base.model, tokenizer=base.tokenizer, precision=torch.bfloat16, head_is_linear=True)
    sampling = Sampling(max_tokens=12)
    completions = one(NativeEngine(policy, GENEROUS, 8), PROMPTS[1], 4, sampling)
    plain = tiny_model(architecture, attention="eager").eval()
    errors = []
    for completion in completions:
        expected = plain_logprobs(plain, PROMPTS[1], completion, sampling)
        errors.extend(abs(a - b) for a, b in zip(completion.logprobs, expected.tolist(), strict=True))
    assert 1e-4 < max(errors) < 0.3
    assert sum(errors) / len(errors) < 0.05


def test_the_cache_budget_is_never_exceeded_and_small_ones_make_waves() -> None:
    policy = tiny_policy("gpt2", torch.float64)
    samplings = [Sampling(max_tokens=60, seed=i) for i in range(4)]
    free = NativeEngine(policy, GENEROUS, 64)
    expected = tokens(sampled(free, PROMPTS, 6, samplings))
    slot_bytes = 2 * 2 * 32 * 8
    budget = slot_bytes * 300
    tight = NativeEngine(policy, budget, 64)
    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.append(tight.cache_bytes_used)
            await asyncio.sleep(0)

    async def run() -> list[list[Completion]]:
        watcher = asyncio.create_task(watch())
        calls = [tight.generate(ids, 6, sampling) for ids, sampling in zip(PROMPTS, samplings, strict=True)]
        groups = await asyncio.gather(*calls)
        watcher.cancel()
        return list(groups)

    assert tokens(asyncio.run(run())) == expected
    stats = tight.take_stats()
    assert stats.peak_rows < 6
    assert 0 < max(seen) <= stats.peak_cache_bytes <= budget
    assert free.take_stats().peak_rows == 24
    assert tight.cache_bytes_used == 0


def test_the_cache_grows_with_what_is_used_not_with_what_is_reserved() -> None:
    engine = NativeEngine(tiny_policy("llama"), GENEROUS, 64)
    one(engine, [1, 2, 3], 4, Sampling(max_tokens=100))
    long = engine.take_stats().peak_cache_bytes
    policy = tiny_policy("llama", stop_ids=range(260))
    engine = NativeEngine(policy, GENEROUS, 64)
    one(engine, [1, 2, 3], 4, Sampling(max_tokens=100))
    assert 0 < engine.take_stats().peak_cache_bytes < long / 2


def test_prompts_that_can_never_fit_are_refused() -> None:
    engine = NativeEngine(tiny_policy("qwen2"), GENEROUS, 8)
    with pytest.raises(ValueError, match=rf"a prompt of 100 tokens with max_tokens=29 .* the policy has {MAX_LENGTH}"):
        one(engine, [1] * 100, 1, Sampling(max_tokens=29))
    assert len(one(engine, [1] * 100, 1, Sampling(max_tokens=28))[0].token_ids) == 28
    slot_bytes = 2 * 2 * 2 * 8 * 4
    small = NativeEngine(tiny_policy("qwen2"), slot_bytes * 50, 8)
    with pytest.raises(ValueError, match=r"a prompt of 60 tokens .* cache_bytes has room for 40"):
        one(small, [1] * 60, 1, Sampling(max_tokens=10))
    with pytest.raises(ValueError, match="at least one token"):
        one(engine, [], 1, Sampling())
    with pytest.raises(ValueError, match="n must be >= 1, got 0"):
        one(engine, [1], 0, Sampling(max_tokens=5))


def test_a_stop_token_is_included_and_ends_the_completion() -> None:
    stop_ids = range(0, 260, 5)
    engine = NativeEngine(tiny_policy("qwen3", stop_ids=stop_ids), GENEROUS, 64)
    completions = one(engine, PROMPTS[0], 32, Sampling(max_tokens=8))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(stop_ids)
        assert (completion.token_ids[-1] in stop_ids) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 8


def test_a_stop_string_over_several_tokens_ends_the_completion() -> None:
    policy = tiny_policy("llama")
    free = one(NativeEngine(policy, GENEROUS, 8), PROMPTS[0], 4, Sampling(max_tokens=40, top_k=3))
    text = TOKENIZER.decode(list(free[2].token_ids[:20]))
    stop = text.strip("\N{REPLACEMENT CHARACTER}")[-3:]
    cut = one(NativeEngine(policy, GENEROUS, 8), PROMPTS[0], 4, Sampling(max_tokens=40, top_k=3, stop=(stop,)))
    assert cut[2].finish_reason == "stop"
    for short, long in zip(cut, free, strict=True):
        assert short.token_ids == long.token_ids[: len(short.token_ids)]
        assert (stop in TOKENIZER.decode(list(short.token_ids))) == (short.finish_reason == "stop")
        assert stop not in TOKENIZER.decode(list(short.token_ids[:-1]))


@pytest.mark.long
def test_requests_that_arrive_while_others_run_join_the_batch() -> None:
    engine = NativeEngine(tiny_policy("gpt2", torch.float64), GENEROUS, 64)
    early, late = Sampling(max_tokens=110, seed=1), Sampling(max_tokens=5, seed=2)

    async def run() -> tuple[list[list[Completion]], bool]:
        first = asyncio.create_task(engine.generate(PROMPTS[1], 3, early))
        while engine.cache_bytes_used == 0:
            await asyncio.sleep(0)
        second = await engine.generate(PROMPTS[0], 3, late)
        overtaken = not first.done()
        return [await first, second], overtaken

    groups, overtaken = asyncio.run(run())
    assert overtaken
    assert tokens(groups) == [
        tokens([one(engine, PROMPTS[1], 3, early)])[0],
        tokens([one(engine, PROMPTS[0], 3, late)])[0],
    ]


def failing_after(policy: Policy, passes: int) -> Any:
    """Makes the model raise after so many forward passes; returns the hook's handle."""
    left = iter([None] * passes)

    def hook(*_: Any) -> None:
        if next(left, "spent") == "spent":
            raise RuntimeError("the device is gone")

    return policy.causal_lm.register_forward_pre_hook(hook)


def test_an_error_while_sampling_reaches_every_waiting_call() -> None:
    policy = tiny_policy("qwen2")
    engine = NativeEngine(policy, GENEROUS, max_rows=4)
    handle = failing_after(policy, passes=3)

    async def run() -> list[Any]:
        calls = [engine.generate(prompt, 3, Sampling(max_tokens=9)) for prompt in PROMPTS]
        return list(await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=30))

    assert [str(error) for error in asyncio.run(run())] == ["the device is gone"] * 4
    handle.remove()
    assert len(one(engine, PROMPTS[0], 2, Sampling(max_tokens=4))) == 2


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=4), Sampling(max_tokens=4, top_p=0.9, top_k=5, min_p=0.1)])
def test_weights_that_have_diverged_are_an_error_not_token_zero(sampling: Sampling) -> None:
    policy = tiny_policy("qwen2")
    engine = NativeEngine(policy, GENEROUS, 4)
    torch.nn.init.constant_(policy.causal_lm.get_input_embeddings().weight, torch.nan)
    with pytest.raises(ValueError, match="must be finite, got nan"):
        one(engine, PROMPTS[0], 2, sampling)


def test_cancelling_a_call_frees_its_rows_and_leaves_the_others_alone() -> None:
    engine = NativeEngine(tiny_policy("gpt2", torch.float64), GENEROUS, max_rows=6)
    expected = one(engine, PROMPTS[0], 4, Sampling(max_tokens=20))

    async def run() -> list[Completion]:
        doomed = asyncio.create_task(engine.generate(PROMPTS[1], 50, Sampling(max_tokens=40)))
        stays = asyncio.create_task(engine.generate(PROMPTS[0], 4, Sampling(max_tokens=20)))
        while engine.cache_bytes_used == 0:
            await asyncio.sleep(0)
        doomed.cancel()
        completions = await stays
        assert doomed.cancelled()
        return completions

    engine.take_stats()
    assert tokens([asyncio.run(run())]) == tokens([expected])
    assert engine.take_stats().sampled_tokens < 50 * 40
    assert engine.cache_bytes_used == 0


def test_the_engine_outlives_event_loops_and_calls_they_abandoned() -> None:
    engine = NativeEngine(tiny_policy("gpt2", torch.float64), GENEROUS, 8)
    expected = one(engine, PROMPTS[0], 2, Sampling(max_tokens=6))

    async def abandon() -> None:
        asyncio.get_running_loop().create_task(engine.generate(PROMPTS[1], 2, Sampling(max_tokens=100)))
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(abandon())
    assert tokens([one(engine, PROMPTS[0], 2, Sampling(max_tokens=6))]) == tokens([expected])
    loop = asyncio.new_event_loop()
    loop.run_until_complete(abandon())
    loop.close()
    assert tokens([one(engine, PROMPTS[0], 2, Sampling(max_tokens=6))]) == tokens([expected])


def test_completions_carry_the_version_they_were_started_with() -> None:
    engine = NativeEngine(tiny_policy("qwen2"), GENEROUS, 8)
    assert one(engine, PROMPTS[0], 1, Sampling(max_tokens=2))[0].policy_version == 0
    engine.load_weights(7)
    assert one(engine, PROMPTS[0], 1, Sampling(max_tokens=2))[0].policy_version == 7

    async def load_too_early() -> None:
        call = asyncio.create_task(engine.generate(PROMPTS[0], 1, Sampling(max_tokens=50)))
        await asyncio.sleep(0)
        try:
            engine.load_weights(8)
        finally:
            call.cancel()

    with pytest.raises(AssertionError, match="1 calls of generate"):
        asyncio.run(load_too_early())


def test_new_weights_are_sampled_at_once() -> None:
    policy = tiny_policy("gpt2", torch.float64)
    engine = NativeEngine(policy, GENEROUS, 8)
    before = one(engine, PROMPTS[0], 2, Sampling(max_tokens=8))
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.1)
    engine.load_weights(1)
    after = one(engine, PROMPTS[0], 2, Sampling(max_tokens=8))
    fresh = one(NativeEngine(policy, GENEROUS, 8), PROMPTS[0], 2, Sampling(max_tokens=8))
    assert [c.logprobs for c in after] == [c.logprobs for c in fresh]
    assert [c.logprobs for c in after] != [c.logprobs for c in before]


def test_a_model_with_layers_that_cache_nothing_is_refused() -> None:
    policy = tiny_policy("qwen2")
    del policy.causal_lm.base_model.layers[1]
    with pytest.raises(ValueError, match="attention in every layer, Qwen2ForCausalLM has it in 1 of 2"):
        NativeEngine(policy, GENEROUS, 8)


def test_statistics_count_a_prompt_once_and_start_again_when_taken() -> None:
    engine = NativeEngine(tiny_policy("qwen2"), GENEROUS, 64)
    sampled(engine, PROMPTS, 3, [Sampling(max_tokens=5)] * 4)
    stats = engine.take_stats()
    assert (stats.prompt_tokens, stats.sampled_tokens, stats.peak_rows) == (22, 60, 12)
    assert stats.seconds > 0
    assert engine.take_stats().sampled_tokens == 0
