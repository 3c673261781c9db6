"""Real vLLM: adapters pushed alone, a server at an address, stop tokens and strings, and a process that is killed."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from covey.engine.base import EngineLost, PushRefused, digest_of
from covey.engine.vllm import files
from covey.engine.vllm.build import build, build_beside
from covey.engine.vllm.engine import VLLMEngine
from covey.engine.vllm.restarting import RestartingEngine
from covey.engine.vllm.server import Server
from covey.engine.vllm.wire import RECEIVER
from covey.engine.weights import make_weight_set
from covey.policy.models.adapters import add_adapters
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.types import Completion, Sampling

from .tiny_served import PROMPT, SETTINGS, gap, gaps, sample, server_of, serving, tiny_policy, train_a_little

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SAMPLING = Sampling(max_tokens=24, seed=3, temperature=0.9)


def push(engine: VLLMEngine, policy: Policy, version: int) -> None:
    asyncio.run(engine.update(make_weight_set(policy, version), "keep"))


def adapted(policy: Policy) -> Policy:
    settings = ModelConfig(lora_rank=4, lora_alpha=8, lora_targets=["q_proj", "v_proj", "down_proj"])
    return replace(policy, model=add_adapters(policy.causal_lm, settings, seed=1))


# ------------------------------------------------------------------------------------------------ adapters


def test_an_adapter_is_pushed_alone_and_sampled_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MEMORY", tmp_path)
    policy = adapted(tiny_policy("qwen2", tied=True))
    with serving(policy) as engine:
        assert gap(policy, sample(engine, SAMPLING), SAMPLING) < 1e-4
        for version in (1, 2):
            before = sample(engine, SAMPLING)
            train_a_little(policy, seed=version)
            push(engine, policy, version)
            completions = sample(engine, SAMPLING)
            assert gap(policy, completions, SAMPLING) < 1e-4
            assert gap(policy, before, SAMPLING) > 1e-2
            assert {completion.policy_version for completion in completions} == {version}
        refuse_half_an_adapter(engine, policy)
        change_an_adapter_in_flight(engine, policy)


def refuse_half_an_adapter(engine: VLLMEngine, policy: Policy) -> None:
    whole = make_weight_set(policy, 9)
    part = dict(list(whole.tensors.items())[1:])
    with pytest.raises(PushRefused, match="1 tensors of the engine's are missing"):
        asyncio.run(engine.update(replace(whole, tensors=part, digest=digest_of(part)), "keep"))


def change_an_adapter_in_flight(engine: VLLMEngine, policy: Policy) -> None:
    sampling = Sampling(max_tokens=300, seed=1)

    async def run() -> list[Completion]:
        under_way = asyncio.create_task(engine.generate(PROMPT, 2, sampling))
        await asyncio.sleep(0.3)
        train_a_little(policy, seed=3)
        await engine.update(make_weight_set(policy, 3), "keep")
        return await under_way

    for completion in asyncio.run(run()):
        last = completion.spans[-1]
        assert last.version == 3
        assert float(gaps(policy, completion, sampling)[last.start :].max()) < 1e-4
        assert float(gaps(policy, completion, sampling)[: last.start].max()) > 1e-2


# ------------------------------------------------------------------------------------------------ stops and death


def test_stops_end_a_completion_and_a_killed_engine_process_is_lost_at_once() -> None:
    policy = tiny_policy("llama", tied=False)
    with serving(policy) as engine:
        (free,) = sample(engine, SAMPLING, n=1)
        texts = [policy.tokenizer.decode([token_id]) for token_id in free.token_ids]
        stop_text = next(text for text in texts[3:] if text.isascii() and text.isprintable())
        (cut,) = sample(engine, replace(SAMPLING, stop=(stop_text,)), n=1)
        assert cut.finish_reason == "stop"
        assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
        assert texts.index(stop_text) == len(cut.token_ids) - 1
        kill_while_sampling(engine)


def tell_engine_process(what: signal.Signals) -> None:
    alive = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    for child in alive:
        if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
            child.send_signal(what)


def kill_while_sampling(engine: VLLMEngine) -> None:
    async def run() -> float:
        under_way = asyncio.create_task(engine.generate(PROMPT, 4, Sampling(max_tokens=480)))
        await asyncio.sleep(0.3)
        tell_engine_process(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineLost, match="vLLM failed: EngineDeadError"):
            await under_way
        return time.monotonic() - started

    assert asyncio.run(run()) < 20
    with pytest.raises(EngineLost, match="vLLM failed: EngineDeadError"):
        sample(engine, SAMPLING)


# ------------------------------------------------------------------------------------------------ beside the trainer


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_lost_vllm_is_restarted_on_its_version(fault: signal.Signals) -> None:
    policy = tiny_policy("qwen2", tied=True)
    engine = build_beside(policy, replace(SETTINGS, deadline=20.0))
    assert isinstance(engine, RestartingEngine)
    try:
        train_a_little(policy, seed=1)
        engine.load_weights(1)
        undisturbed = asyncio.run(engine.generate(PROMPT, 4, SAMPLING))
        completions = asyncio.run(disturbed(engine, fault))
        assert gap(policy, completions, SAMPLING) < 1e-4
        assert [c.token_ids for c in completions] == [c.token_ids for c in undisturbed]
        assert {c.policy_version for c in completions} == {1}
        assert engine.take_stats().restarts == 1
    finally:
        engine.close()
    assert not [child for child in psutil.Process().children(recursive=True) if "EngineCore" in child.name()]


async def disturbed(engine: RestartingEngine, fault: signal.Signals) -> list[Completion]:
    """Sample while the engine's process is killed or stopped."""
    calls = (engine.generate(PROMPT, 4, Sampling(max_tokens=200)), engine.generate(PROMPT, 4, SAMPLING))
    under_way = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.01)
    tell_engine_process(fault)
    return (await asyncio.gather(*under_way))[-1]


def test_calls_of_sleep_and_waking_go_through_and_do_nothing_on_a_cpu() -> None:
    policy = tiny_policy("qwen2", tied=False)
    engine = build(policy, replace(SETTINGS, gpu_memory_utilization=0.1), sleep_level=2)
    try:
        for version in (1, 2):
            engine.rest()
            train_a_little(policy, seed=version)
            engine.load_weights(version)
            completions = sample(engine, SAMPLING)
            assert gap(policy, completions, SAMPLING) < 1e-4
            assert {c.policy_version for c in completions} == {version}
        engine.rest()
        assert gap(policy, sample(engine, SAMPLING), SAMPLING) < 1e-4  # woken by being asked
    finally:
        engine.close()


# ------------------------------------------------------------------------------------------------ a server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """vLLM's own server, on a model of the same shape with other weights."""
    other = tiny_policy("qwen3", tied=True)
    train_a_little(other, seed=50)
    files.save_policy(other, tmp_path / "model")
    words = "--enable-scale-out --logprobs-mode processed_logprobs --api-key secret --max-num-seqs 16 "
    words += f"--worker-extension-cls {RECEIVER} --kv-cache-memory-bytes 20000000"
    with server_of(tmp_path / "model", tmp_path / "log", words) as found:
        yield found


def test_a_server_that_runs_takes_the_policys_weights_and_samples_on_them(
    server: tuple[str, "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, process = server
    policy = tiny_policy("qwen3", tied=True)
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(EngineLost, match="answered 401 to /inference/v1/generate"):
        asyncio.run(score_once(url))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    engine = build(policy, replace(SETTINGS, url=url, deadline=15.0))
    try:
        assert gap(policy, sample(engine, SAMPLING), SAMPLING) < 1e-4
        train_a_little(policy, seed=1)
        push(engine, policy, 1)
        completions = sample(engine, SAMPLING)
        assert gap(policy, completions, SAMPLING) < 1e-4
        assert {completion.policy_version for completion in completions} == {1}
        refuse_a_wrong_shape(engine, policy)
    finally:
        engine.close()
    name_what_is_wrong(url, process, policy)


def name_what_is_wrong(url: str, process: "subprocess.Popen[bytes]", policy: Policy) -> None:
    """Lose the server in each way there is; each engine is lost once."""
    faults = {
        "answers from weights '.*', which this run did not push": lambda: asyncio.run(push_as_somebody_else(url)),
        "did not answer a ping within 15 s": lambda: os.killpg(process.pid, signal.SIGSTOP),
        "is gone": lambda: os.killpg(process.pid, signal.SIGKILL),
    }
    for line, make_fault in faults.items():
        engine = build(policy, replace(SETTINGS, url=url, deadline=15.0))
        try:
            sample(engine, SAMPLING)
            make_fault()
            started = time.monotonic()
            with pytest.raises(EngineLost, match=f"^the vLLM server at {url} {line}"):
                sample(engine, SAMPLING)
            assert time.monotonic() - started < 30
        finally:
            engine.close()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)


async def push_as_somebody_else(url: str) -> None:
    server = Server(url, "any")
    try:
        await server.label(7)
    finally:
        await server.close()


async def score_once(url: str) -> None:
    server = Server(url, "any")
    try:
        await server.score((1, 2))
    finally:
        await server.close()


def refuse_a_wrong_shape(engine: VLLMEngine, policy: Policy) -> None:
    whole = make_weight_set(policy, 9)
    wrong = dict(whole.tensors) | {"model.norm.weight": torch.zeros(7)}
    with pytest.raises(PushRefused, match=r"version 9: model\.norm\.weight has the shape"):
        asyncio.run(engine.update(replace(whole, tensors=wrong, digest=digest_of(wrong)), "keep"))
