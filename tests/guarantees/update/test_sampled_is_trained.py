"""Promise 2: what was sampled is what is trained. The engine's log-probs are the trainer's, on the same weights.

Float32: 1e-4 nats on every token, at the real temperature, top-k, top-p and min-p.
"""

import asyncio
import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.engine.base import Engine
from covey.engine.build import ENGINES, sampling_engine
from covey.engine.native.engine import NativeEngine
from covey.engine.settings import EngineConfig
from covey.environments.settings import CustomConfig
from covey.loop import train
from covey.policy.logprobs import Scoring
from covey.policy.policy import Policy
from covey.rollouts.rollout import causal_rollout
from covey.types import Completion, Group, Prompt, Reward, Sampling
from tests.support.scripted import Scripted

from ...support.builders import ARCHITECTURES, copied, logprobs, make, make_policy
from ...support.small import POLICIES, rows, scripted, scripted_for, small_config, use, varied
from .updates import adapted

TOLERANCE = 1e-4
PROMPTS = ((5, 9, 20), (17, 3, 14, 11, 7, 25, 31, 30, 29, 12, 6), (33,), (1, 2, 3, 4, 5, 6, 7))
SAMPLINGS = {
    "plain": Sampling(max_tokens=16),
    "temperature": Sampling(temperature=0.7, max_tokens=16),
    "top_k": Sampling(temperature=0.7, top_k=8, max_tokens=16),
    "top_p": Sampling(temperature=0.7, top_p=0.8, max_tokens=16),
    "min_p": Sampling(temperature=0.7, min_p=0.05, max_tokens=16),
    "all": Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, max_tokens=16),
}


def policy_of(architecture: str, adapters: bool) -> Policy:
    policy = make_policy(architecture)
    return adapted(policy, rank=4) if adapters else policy


def sampled(engine: Engine, sampling: Sampling, n: int = 4) -> list[list[Completion]]:
    """All prompts at the same time, each with a seed of its own."""

    async def run() -> list[list[Completion]]:
        calls = (engine.generate(prompt, n, replace(sampling, seed=index)) for index, prompt in enumerate(PROMPTS))
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())


def groups_of(completions: Sequence[Sequence[Completion]]) -> list[Group]:
    """As the loop makes them of what the engine answers."""
    return [
        Group(
            Prompt(f"p{index}", "test", "", {}),
            tuple(causal_rollout(prompt, completion, Reward(0.0, {}), "") for completion in group),
            (),
        )
        for index, (prompt, group) in enumerate(zip(PROMPTS, completions, strict=True))
    ]


def recorded(groups: Sequence[Group]) -> Tensor:
    """What the engine said of every loss token, in batch order."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return torch.tensor(
        [value for r in rollouts for value, mine in zip(r.sampler_logprobs, r.loss_mask, strict=True) if mine]
    )


def gap(policy: Policy, groups: Sequence[Group], sampling: Sampling, packing: str = "shared", chunk: int = 0) -> float:
    """The largest difference between engine and trainer on a token, in nats."""
    scored = logprobs(policy, make(groups, packing, 60).micro_batches, Scoring(sampling, chunk))
    return float((scored - recorded(groups)).abs().max())


def cases() -> list[Any]:
    """Architecture, sampling, with adapters or without; the quick half runs every time."""
    return [
        pytest.param(*case, marks=[] if case[1] == "all" or not case[2] else pytest.mark.slow)
        for case in itertools.product(ARCHITECTURES, SAMPLINGS, (False, True))
    ]


@pytest.mark.parametrize(("architecture", "name", "adapters"), cases())
def test_the_engine_s_log_probs_are_the_trainer_s(architecture: str, name: str, adapters: bool) -> None:
    """Prompts are shared by four rows each, which enter in waves of five, and the trainer packs them in three ways."""
    policy, sampling = policy_of(architecture, adapters), SAMPLINGS[name]
    engine = NativeEngine(policy, 1 << 24, max_rows=5)
    groups = groups_of(sampled(engine, sampling))
    assert engine.take_stats().peak_rows == 5
    assert {rollout.finish_reason for group in groups for rollout in group.rollouts} == {"stop", "length"}
    assert float(recorded(groups).std()) > 0.2
    for packing, chunk in (("shared", 0), ("packed", 7), ("padded", 1)):
        assert gap(policy, groups, sampling, packing, chunk) < TOLERANCE


def test_a_cache_so_small_that_rows_wait_changes_no_log_prob() -> None:
    policy, sampling = make_policy("qwen2"), SAMPLINGS["all"]
    slot_bytes = 2 * 2 * 2 * 16 * 4
    engine = NativeEngine(policy, slot_bytes * 120, max_rows=64)
    groups = groups_of(sampled(engine, sampling))
    assert engine.take_stats().peak_rows < 6
    assert gap(policy, groups, sampling) < TOLERANCE


# ------------------------------------------------------------------------------------- which log-probs these are


def by_hand(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """Log-probs of the tokens that may be drawn, by the definitions: temperature, top-k, top-p, min-p, again 1."""
    tempered = torch.tensor(logits, dtype=torch.float64) / sampling.temperature
    probability = dict(enumerate(tempered.softmax(0).tolist()))
    kept = sorted(probability, key=lambda token: -probability[token])[: sampling.top_k or len(logits)]
    mass = sum(probability[token] for token in kept)
    nucleus: list[int] = []
    for token in kept:
        if sum(probability[t] for t in nucleus) / mass < sampling.top_p:
            nucleus.append(token)
    likely = [token for token in nucleus if probability[token] >= sampling.min_p * probability[nucleus[0]]]
    total = sum(probability[token] for token in likely)
    return {token: float(torch.tensor(probability[token] / total).log()) for token in likely}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_they_are_those_of_the_filtered_distribution_renormalised(name: str) -> None:
    policy, sampling = make_policy("qwen2"), SAMPLINGS[name]
    plain = copy.deepcopy(policy.causal_lm)
    plain.set_attn_implementation("eager")
    worst, furthest = 0.0, 0.0
    for prompt, group in zip(PROMPTS, sampled(NativeEngine(policy, 1 << 24, 64), sampling, n=2), strict=True):
        for completion in group:
            with torch.no_grad():
                logits_TV = plain(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
            for token, logprob, logits in zip(completion.token_ids, completion.logprobs, logits_TV, strict=True):
                worst = max(worst, abs(by_hand(logits.tolist(), sampling)[token] - logprob))
                furthest = max(furthest, abs(float(logits.log_softmax(0)[token]) - logprob))
    assert worst < TOLERANCE
    assert (furthest > 0.2) == (name != "plain")


def test_the_stop_token_is_in_the_loss() -> None:
    policy = make_policy("llama")
    groups = groups_of(sampled(NativeEngine(policy, 1 << 24, 64), SAMPLINGS["plain"], n=8))
    stopped = [r for group in groups for r in group.rollouts if r.finish_reason == "stop"]
    assert len(stopped) > 5
    for rollout in stopped:
        assert rollout.target_ids[-1] in policy.stop_ids
        assert rollout.loss_mask[-1]
        assert rollout.sampler_logprobs[-1] < 0
    targets = torch.cat([micro.target_L for micro in make(groups).micro_batches]).tolist()
    assert sum(target in policy.stop_ids for target in targets) == len(stopped)


@pytest.mark.long
def test_the_stop_string_is_written_and_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    stops = "abcdefghijklm"
    settings = {"sampling__stop": list(stops), "sampling__max_tokens": 30, "output__rollouts_per_step": 8}
    train(small_config(**settings), tmp_path)
    written = [row["completion"] for row in rows(tmp_path / "rollouts.jsonl")]
    assert any(text.endswith(tuple(stops)) for text in written)
    assert not any(set(text[:-1]) & set(stops) for text in written)


# ------------------------------------------------------------------------------------- over a run, at every step


def trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str = "causal", **settings: Any
) -> list[dict[str, Any]]:
    """The rows of a run with steps so large that weights which were not published would show at once."""
    use(monkeypatch, scripted_for(kind))
    large: dict[str, Any] = {
        "num_steps": 4,
        "preflight__enabled": False,
        "optimizer__lr": 5e-2,
        "sampling__max_tokens": 12,
    }
    train(small_config(**large | settings), folder)
    return rows(folder / "metrics.jsonl", "train")


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sampling__temperature": 0.6},
        {"sampling__temperature": 1.3, "sampling__top_k": 20},
        {"sampling__top_p": 0.8},
        {"sampling__min_p": 0.05, "sampling__temperature": 0.8},
        {"sampling__top_k": 30, "sampling__top_p": 0.9, "sampling__min_p": 0.01, "sampling__stop": ["a", "e"]},
        {"model__lora_rank": 4, "sampling__temperature": 0.7, "sampling__top_p": 0.9},
        {"updates_per_batch": 2, "sampling__top_p": 0.9, "algorithm__kl_coef": 0.1},
        {"packing": "padded", "engine__max_rows": 3, "logprob_chunk": 5, "micro_batch_tokens": 40},
    ],
    ids=",".join,
)
def test_log_probs_of_engine_and_trainer_agree_after_every_update(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(tmp_path, monkeypatch, **settings)
    assert len(found) == 4
    assert all(row["mismatch_max"] < TOLERANCE for row in found)
    assert all(row["grad_norm"] > 0 for row in found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        pytest.param(architecture, settings, id=f"{architecture}-{','.join(settings)}", marks=marks)
        for place, settings in enumerate(
            (
                {},
                {"sampling__num_passes": 3},
                {"sampling__num_passes": 3, "sampling__likelihood": "one_step"},
                {"model__lora_rank": 4},
                {"updates_per_batch": 2, "algorithm__kl_coef": 0.1, "algorithm__kl_estimator": "full"},
                {"packing": "padded", "engine__max_rows": 3, "logprob_chunk": 5, "micro_batch_tokens": 40},
            )
        )
        for architecture, marks in (("modernbert", []), ("roberta", [] if place in (2, 3) else [pytest.mark.slow]))
    ],
)
def test_log_probs_of_a_policy_that_fills_in_agree_after_every_update(
    architecture: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(
        monkeypatch,
        Scripted({"train": [f"<mask>o<mask>{n} <mask>a<mask>" for n in range(6)], "test": ["t<mask>"]}, varied),
    )
    masked = {"model__name": "nano-masked", "model__kind": "masked", "model__nano_architecture": architecture}
    masked["environment"] = CustomConfig(factory="tests:anything")  # arithmetic has no masks, and `use` replaces both
    drawn = {"engine__name": "fill", "sampling__temperature": 0.8, "sampling__top_p": 0.95}
    plain = {"num_steps": 4, "optimizer__lr": 5e-2, "preflight__enabled": False}
    train(small_config(**plain, **masked, **drawn, **settings), tmp_path)
    found = rows(tmp_path / "metrics.jsonl", "train")
    assert len(found) == 4
    assert all(row["mismatch_max"] < 1e-5 for row in found)
    assert all(row["grad_norm"] > 0 for row in found)


MISMATCH = {
    *("mismatch", "mismatch_max", "mismatch_kl", "sampler_kl_k1", "sampler_chi2_token", "sampler_chi2_sequence"),
    *("sampler_weight_mean", "sampler_ppl", "sampler_behaviour_ppl", "sampler_log_ppl_abs_diff", "ess_fraction"),
}


def never_reloaded(policy: Policy, settings: EngineConfig, kernels: str) -> Engine:
    """An engine that goes on sampling from the first weights."""
    return sampling_engine(copied(policy), settings, kernels)


@pytest.mark.long
@pytest.mark.parametrize("kind", POLICIES)
def test_an_engine_on_old_weights_is_seen_in_the_first_step_after_they_changed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = POLICIES[kind]
    monkeypatch.setitem(ENGINES, chosen.get("engine__name", "native"), never_reloaded)
    found = trained(tmp_path, monkeypatch, kind, **chosen)
    assert found[0]["mismatch_max"] < TOLERANCE
    assert all(row["mismatch_max"] > 0.01 for row in found[1:])
    assert all(row["mismatch_kl"] > 1e-6 for row in found[1:])
    assert all(row["ess_fraction"] < 0.9999 for row in found[1:])


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "vllm"])  # tests/engine/vllm/real
def test_the_mismatch_of_every_engine_is_logged_at_every_step(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "masked" if engine == "fill" else "causal"
    found = trained(tmp_path, monkeypatch, kind, **{**POLICIES[kind], "engine__name": engine})
    assert all(row.keys() >= MISMATCH for row in found)
    assert all((row["mismatch"] > 0.1) == (engine == "fake") for row in found)


def test_a_mismatch_that_is_not_negligible_is_corrected_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "native", never_reloaded)
    settings = {"algorithm__correction": "truncate", "algorithm__correction_max": 1.0}
    plain, corrected = trained(tmp_path / "a", monkeypatch), trained(tmp_path / "b", monkeypatch, **settings)
    # Weights of the first step are 1 but for rounding, so the second begins with all but the same policy.
    assert plain[1]["mismatch"] == pytest.approx(corrected[1]["mismatch"], rel=1e-5)
    assert corrected[1]["correction_weight"] < 0.999
    assert abs(plain[1]["grad_norm"] / corrected[1]["grad_norm"] - 1) > 1e-4
