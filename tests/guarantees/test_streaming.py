"""Streaming inside a step gives the update of the whole batch, wherever and in whatever order its groups come."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from covey.algorithm.aggregation import Denominators
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.credit.scores import Scores, scores
from covey.algorithm.settings import OVER_THE_BATCH
from covey.config.auto_adjust import add_correction
from covey.config.validate import validate
from covey.environments.base import Environment
from covey.environments.episode import Answer, Episode, Observation
from covey.loop import train
from covey.policy.models.nano import nano_tokenizer
from covey.policy.settings import ModelConfig
from covey.run.records.record import RunRecorder
from covey.trainer import prepare
from covey.types import Failure, Group, Prompt, Reward, RunStopped
from covey_report.runs.replay import replay

from ..support.fake_ray import fake_ray
from ..support.processes import on_two_ranks
from ..support.scripted import Scripted
from ..support.small import POLICIES, SETTINGS, rows, scripted, scripted_for, small_config, use
from .test_source_ray import apart, logged

OF_NANO = ("model__nano_hidden_size", "model__nano_num_layers", "model__nano_num_heads")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "filter": {"algorithm__group_filter": "zero_std", "algorithm__group_filter_rounds": 2},
    "reference": {"algorithm__kl_coef": 0.1, "algorithm__kl_in": "loss"},
    "kl_in_reward": {"algorithm__kl_coef": 0.1, "algorithm__kl_in": "reward", "algorithm__kl_estimator": "k1"},
    "sequences": {"algorithm__aggregation": "seq_mean_token_sum_norm", "algorithm__advantage": "group_center"},
    "sum": {"algorithm__aggregation": "token_sum"},
    "entropy": {"algorithm__entropy_coef": 0.01},
    "truncated": {"algorithm__mask_truncated": True, "sampling__stop": list("aeiou")},
    "lora": {"model__lora_rank": 4, "model__lora_targets": ["c_attn"]},
    "chunks": {"logprob_chunk": 4, "micro_batch_tokens": 24},
    "turns": {"algorithm__turn_credit": "discounted", "algorithm__turn_credit_options": {"gamma": 0.7}},
    "states": {"algorithm__turn_credit": "anchor_state", "algorithm__drop_void_turns": True},
    "masked": POLICIES["masked"] | {name: SETTINGS[name.replace("__", ".")] for name in OF_NANO},
}
OF_NO_NANO = {name: vars(ModelConfig())[name.removeprefix("model__")] for name in OF_NANO}
OF_THE_WORK = ("num_micro_batches", "streamed_fraction")
"""How the work was split up, which is no part of the result."""


TRAINED_AHEAD: list[int] = []
"""Grows where groups are trained ahead, in tests that watch it."""


@dataclass(frozen=True)
class Unhurried(Scripted):
    """Scores prompts with an odd number once others were trained ahead, or after so many seconds."""

    seconds: float = 0.5

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        if int(prompt.id[-1]) % 2 and prompt.id.startswith("train"):
            known, until = len(TRAINED_AHEAD), time.monotonic() + self.seconds
            while len(TRAINED_AHEAD) == known and time.monotonic() < until:
                await asyncio.sleep(0.005)
        return await super().score(prompt, completions)


class Talk(Episode):
    """Says a word to anything, up to three times, and pays for each answer by itself; one word in three is void."""

    async def reply(self, answer: Answer) -> Observation:
        sum_of_bytes = sum(answer.text.encode())
        reward, state, is_void = sum_of_bytes % 5 / 10, f"s{sum_of_bytes % 2}", sum_of_bytes % 3 == 0
        return Observation(" so?", reward=reward, done=answer.turn == 3, state=state, is_void=is_void)


class Talking(Unhurried):
    """The same in episodes of several turns."""

    def episode(self, prompt: Prompt, seed: int) -> Episode:
        return Talk()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late prompts wait for groups to be trained ahead, not for the clock."""

    def train_ahead(groups: Sequence[Group], *others: Any) -> None:
        prepare.train_ahead(groups, *others)
        TRAINED_AHEAD.append(len(groups))

    monkeypatch.setattr("covey.loop.train_ahead", train_ahead)


def some_alike(prompt: Prompt, text: str) -> float:
    """Every third prompt rewards all completions alike."""
    return 1.0 if prompt.id[-1] in "03" else sum(text.encode()) % 5 / 4


def unhurried(feature: str, seconds: float = 0.5) -> Environment:
    kind = "masked" if feature == "masked" else "causal"
    plain = scripted(some_alike) if feature == "filter" else scripted_for(kind)
    made = Talking if feature in ("turns", "states") else Unhurried
    return made(plain.texts, plain.verdict, seconds=seconds)


def settings(**changes: Any) -> dict[str, Any]:
    # Not AdamW: it divides by the size of gradients, and where those are 0 but for rounding, rounding decides.
    usual = {"optimizer__name": "sgd", "optimizer__lr": 0.1, "model__precision": "float64"}
    usual |= {"num_steps": 3, "groups_per_step": 4, "preflight__enabled": False}
    return usual | {"output__rollouts_per_step": 40, "sampling__max_tokens": 8} | changes


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that computes in float64 throughout: those with an RMS norm take that in float32."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = nano_tokenizer()
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": len(tokenizer)}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def without_work(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in OF_THE_WORK} for row in logged(folder)]


def streamed(folder: Path) -> list[float]:
    return [row["streamed_fraction"] for row in rows(folder / "metrics.jsonl", "train")]


OVER_RAY = ("plain", "filter", "kl_in_reward", "masked")
"""What samplers do otherwise; the others differ in training alone, and are slow tests there."""
BOTH = [
    pytest.param(feature, source, marks=[] if source == "local" or feature in OVER_RAY else pytest.mark.slow)
    for feature in FEATURES
    for source in ("local", "ray")
]


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(("feature", "source"), BOTH)
def test_a_streamed_run_has_the_metrics_of_a_run_that_waits(
    feature: str, source: str, gpt2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, unhurried(feature))
    chosen = settings(**{"model__name": gpt2} | OF_NO_NANO | FEATURES[feature])
    train(small_config(**chosen), tmp_path / "waits")
    with fake_ray():
        train(small_config(**chosen, source=source, streaming=True), tmp_path / "streams")
    assert apart(without_work(tmp_path / "waits"), without_work(tmp_path / "streams")) == []
    assert apart(*(logged(tmp_path / name, "rollouts.jsonl") for name in ("waits", "streams"))) == []
    assert 0 < max(streamed(tmp_path / "streams")) < 1


@pytest.mark.parametrize("source", ["local", "ray"])
def test_two_ranks_stream_what_one_process_waits_for(
    source: str, gpt2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, unhurried("plain", seconds=0.2))
    chosen = settings(**{"model__name": gpt2} | OF_NO_NANO)

    def work() -> list[float]:
        with fake_ray():
            train(small_config(**chosen, source=source, streaming=True), tmp_path / "streams")
        return streamed(tmp_path / "streams")

    ranks = on_two_ranks(work, tmp_path, seconds=200.0)
    train(small_config(**chosen), tmp_path / "waits")
    assert 0 < max(ranks[0]) < 1
    of_all = [{k: v for k, v in row.items() if k != "num_ranks"} for row in without_work(tmp_path / "streams")]
    assert apart(without_work(tmp_path / "waits"), of_all) == []


def test_a_streamed_stale_run_replays_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, unhurried("plain", seconds=0.3))
    config, _ = add_correction(small_config(**settings(source="ray", max_staleness=1, num_steps=5, streaming=True)))
    with fake_ray():
        train(config, tmp_path / "run")
    schedule = rows(tmp_path / "run" / "schedule.jsonl")
    assert any(row.get("ahead") for row in schedule)
    (tmp_path / "again").mkdir()
    with RunRecorder(config, tmp_path / "again") as record:
        digest = replay(config, tmp_path / "run", record, lambda text: None)
    assert digest == schedule[-1]["weights"]


def test_two_ranks_replay_what_each_of_them_trained_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, unhurried("filter", seconds=0.3))
    chosen = settings(source="ray", max_staleness=1, num_steps=4, streaming=True, groups_per_step=5)
    config, _ = add_correction(small_config(**chosen | FEATURES["filter"]))

    def work() -> str:
        with fake_ray():
            train(config, tmp_path / "run")
        return ""

    def again() -> str:
        with RunRecorder(config, tmp_path / "again") as record:
            return replay(config, tmp_path / "run", record, lambda text: None)

    for name in ("run-ranks", "again"):
        (tmp_path / name).mkdir()
    on_two_ranks(work, tmp_path / "run-ranks", seconds=200.0)
    schedule = rows(tmp_path / "run" / "schedule.jsonl")
    early = [(row, place) for row in schedule for part in row.get("ahead", ()) for place in part]
    assert {row["ranks"][place] for row, place in early} == {0, 1}
    assert on_two_ranks(again, tmp_path / "again", seconds=200.0) == [schedule[-1]["weights"]] * 2


# ------------------------------------------------------------------------------------------------ what is refused


def together(given: Scores) -> Any:
    """An advantage of one's own that looks at the whole batch."""
    return given.rewards_N - given.rewards_N.mean()


@pytest.mark.usefixtures("watched")
def test_an_advantage_that_looks_at_other_groups_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, unhurried("plain"))
    chosen = settings(streaming=True, algorithm__advantage="tests.guarantees.test_streaming:together")
    with pytest.raises(RunStopped, match=r"^the advantages of prompt train-\d depend on other groups: streaming=true"):
        train(small_config(**chosen), tmp_path / "run")


def advantages(name: str, first: int) -> list[float]:
    """Of the second of two groups of four, alone (first=4) or with the other (first=0)."""
    rewards, groups, lengths = [1.0, 1.0, 1.0, 1.0, 3.0, 2.0, 2.0, 0.0], "aaaabbbb", [3, 1, 2, 5, 7, 1, 1, 4]
    parts = [[reward] for reward in rewards]
    given = scores(rewards[first:], groups[first:], lengths=lengths[first:], parts=parts[first:], weights=[1.0])
    options = {"k": 2} if name in ("passk", "pkpo") else {}
    found: list[float] = ADVANTAGES[name](given, **options).tolist()
    return found[-4:]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_over_the_batch_are_those_that_other_groups_have_a_part_in(name: str) -> None:
    is_same = advantages(name, 0) == pytest.approx(advantages(name, 4), abs=1e-12)
    assert is_same == (name not in OVER_THE_BATCH)


def evenly(counts_N: Tensor, denominators: Denominators) -> Tensor:
    """Weigh every rollout the same."""
    return torch.ones_like(counts_N) / denominators.sequences


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "post_normalize": (
        {"algorithm__advantage": "leave_one_out", "algorithm__advantage_options": {"post_normalize": "batch_zscore"}},
        "needs algorithm.advantage_options.post_normalize = none, got .*batch_zscore",
    ),
    "aggregation": (
        {"algorithm__aggregation": "tests.guarantees.test_streaming:evenly"},
        "needs a built-in algorithm.aggregation, whose count is known, got algorithm.aggregation=tests",
    ),
    "updates": ({"updates_per_batch": 2}, "needs updates_per_batch = 1, got updates_per_batch=2"),
    "fsdp": ({"parallel__strategy": "fsdp"}, "needs parallel.strategy = ddp, got parallel.strategy=fsdp"),
    "batch_std": (
        {"algorithm__advantage": "group_center_batch_std"},
        "needs an algorithm.advantage of a group alone, got algorithm.advantage=group_center_batch_std",
    ),
    "selection": ({"algorithm__selection": "top_k"}, "needs algorithm.selection = null"),
    "m2po": ({"algorithm__m2po_threshold": 0.04}, "looks at a group alone .* with algorithm.m2po_threshold=0.04"),
    "entropy": ({"algorithm__high_entropy_fraction": 0.2}, "with algorithm.high_entropy_fraction=0.2"),
    "covariance": ({"algorithm__loss": "clip_cov"}, "algorithm.loss=clip_cov with a choice among all tokens"),
    "divisors": (
        {"algorithm__aggregation": "seq_mean_token_mean", "algorithm__entropy_coef": 0.1},
        "divided by one count, .* with terms divided by num_sequences and num_tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_at_the_whole_batch_is_refused_in_one_line(name: str) -> None:
    changes, line = REFUSED[name]
    with pytest.raises(
        ValueError, match=rf"^streaming=true {line}|^streaming=true needs a loss that .*{line}"
    ) as found:
        validate(small_config(**settings(streaming=True, **changes)))
    assert "\n" not in str(found.value)
