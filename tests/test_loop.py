"""The loop from end to end: what it leaves, that it repeats itself, and every algorithm preset through it."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.algorithm.settings import AlgorithmConfig
from covey.config.schema import Config
from covey.config.shelves import presets
from covey.loop import is_due, train
from covey.policy.models.loading import load_policy
from covey.run import stages
from covey.types import Failure, Prompt, RunStopped

from .support.small import (
    TOKENIZER,
    equal,
    rows,
    saved_weights,
    scripted,
    small_config,
    start_weights,
    timeless,
    use,
    varied,
)

NAMES = list(presets("algorithm"))


def preset(name: str) -> AlgorithmConfig:
    chosen = OmegaConf.load(presets("algorithm")[name])
    chosen.pop("defaults")
    merged = OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), chosen)
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def run(folder: Path, config: Config | None = None, **changes: Any) -> Path:
    """Train into `folder`, without the preflight, which has tests of its own, unless a config asks for it."""
    train(config or small_config(**{"preflight__enabled": False} | changes), folder)
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    return rows(folder / "metrics.jsonl", "train")


def summary_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that many tests look at."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, scripted())
        folder = tmp_path_factory.mktemp("run")
        changes = {"num_steps": 4, "evaluation__every": 2, "output__save_every": 2, "output__rollouts_per_step": 3}
        return run(folder, small_config(**changes))


# ------------------------------------------------------------------------------------------------ the run folder


@pytest.mark.long
def test_metrics_have_one_row_a_step_and_one_an_evaluation(finished: Path) -> None:
    found = rows(finished / "metrics.jsonl")
    steps = [(row["kind"], row["step"]) for row in found]
    first, second = [("evaluate", 0), ("train", 1), ("train", 2)], [("evaluate", 2), ("train", 3), ("train", 4)]
    assert steps == [*first, *second, ("evaluate", 4)]
    wanted = {
        *("loss", "policy_loss", "grad_norm", "entropy", "ratio_max", "mismatch_max", "learning_rate", "reward_mean"),
        *("zero_std_fraction", "completion_length_mean", "truncated_fraction", "staleness_max", "reward/value"),
        *("seconds", "tokens_per_second", "num_groups", "num_rollouts_trained", "dropped/unscored_rollouts"),
    }
    for row in metrics(finished):
        assert wanted <= row.keys()
    of_evaluations = (
        "step",
        "kind",
        "time",
        "accuracy",
        "reward_mean",
        "reward/value",
        "pass_at_1",
        "pass_at_2",
        "num_unscored",
    )
    assert found[0].keys() == set(of_evaluations)


def test_on_policy_steps_have_ratio_1_no_staleness_and_no_mismatch(finished: Path) -> None:
    for row in metrics(finished):
        assert row["ratio_max"] == 1.0
        assert row["staleness_max"] == 0.0
        assert row["mismatch_max"] < 1e-4


def test_a_few_rollouts_a_step_are_logged_with_text_and_reward(finished: Path) -> None:
    found = rows(finished / "rollouts.jsonl")
    assert [row["step"] for row in found] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert found[0].keys() == {
        *("step", "time", "environment", "prompt_id", "prompt", "columns", "completion", "num_tokens"),
        *("reward", "parts", "advantage", "finish_reason", "policy_version", "dropped"),
    }
    for row in found:
        assert row["reward"] == varied(Prompt("p", "scripted", "", {}), row["completion"])
        assert row["policy_version"] == row["step"] - 1


def test_the_answers_of_every_evaluation_are_kept_greedy_ones_first(finished: Path) -> None:
    found = rows(finished / "evaluations.jsonl")
    assert [(row["step"], row["greedy"]) for row in found] == [
        (step, greedy) for step in (0, 2, 4) for greedy in (True, True, False, False, False, False)
    ]
    for row in found:
        assert row["reward"] == varied(Prompt("p", "scripted", "", {}), row["completion"])
        assert row["correct"] == (row["reward"] >= 1)
    for look in rows(finished / "metrics.jsonl", "evaluate"):
        of_look = [row for row in found if row["step"] == look["step"]]
        assert sum(row["correct"] for row in of_look if row["greedy"]) / 2 == look["accuracy"]
        assert sum(row["reward"] for row in of_look if not row["greedy"]) / 4 == pytest.approx(look["reward_mean"])


def test_answers_of_evaluations_are_bounded_so_that_the_last_evaluation_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    folder = run(
        tmp_path, num_steps=3, evaluation__every=1, output__answers_per_evaluation=5, output__max_rollout_rows=9
    )
    assert [row["step"] for row in rows(folder / "evaluations.jsonl")] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_rollouts_in_all_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    folder = run(tmp_path, output__max_rollout_rows=5, output__rollouts_per_step=4)
    assert [row["step"] for row in rows(folder / "rollouts.jsonl")] == [1] * 4 + [2]


def test_checkpoints_load_with_transformers_alone(finished: Path) -> None:
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    policy = finished / "checkpoints" / "step-000004" / "policy"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    ids = tokenizer("prompt 0:", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, 9, len(TOKENIZER))
    assert model.dtype == torch.float32
    middle = AutoModelForCausalLM.from_pretrained(finished / "checkpoints" / "step-000002" / "policy").state_dict()
    assert not equal(middle, saved_weights(finished))


def test_a_run_from_a_checkpoint_reads_text_as_the_run_before_did(finished: Path) -> None:
    """Transformers takes Qwen2's tokenizer for any model of that architecture, which is not the one that was saved."""
    settings = replace(small_config().model, name=str(finished / "checkpoints" / "step-000004" / "policy"))
    loaded = load_policy(settings, seed=0).tokenizer
    for text in ("a  b\n\n", "e\u0301 \u212b", "<|endoftext|>", "<turn>x</turn>"):
        assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert len(loaded) == len(TOKENIZER)


def test_the_summary_has_what_a_program_needs_to_judge_a_run(finished: Path) -> None:
    content = summary_of(finished)
    for side in (content["before"], content["after"]):
        for estimate in (side["accuracy"], side["reward_mean"], side["pass_at_k"]["1"], side["pass_at_k"]["2"]):
            assert estimate["low"] <= estimate["value"] <= estimate["high"]
        assert (side["num_prompts"], side["num_samples"]) == (2, 2)
    assert (content["status"], content["steps"], content["seed"]) == ("completed", 4, 0)
    assert content["versions"].keys() >= {"python", "torch", "transformers", "covey"}
    assert content["peak_memory_bytes"] > 50 * 2**20
    assert content["tokens"] == sum(round(row["completion_length_mean"] * 8) for row in metrics(finished))
    phases = content["phases"]
    assert phases.keys() >= {"sampling", "reward", "logprobs", "backward", "optimizer", "evaluation", "other"}
    assert sum(phase["share"] for phase in phases.values()) == pytest.approx(1)
    assert sum(phase["seconds"] for phase in phases.values()) == pytest.approx(content["seconds"])


def test_evaluations_and_checkpoints_come_every_n_steps_and_at_the_end() -> None:
    assert [step for step in range(6) if is_due(step, 2, 6)] == [1, 3]
    assert [step for step in range(5) if is_due(step, 2, 5)] == [1, 3]
    assert not any(is_due(step, 0, 5) for step in range(5))


# ------------------------------------------------------------------------------------------------ repeatability


@pytest.mark.long
def test_the_same_seed_gives_the_same_run_bit_for_bit_and_another_seed_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    torch.manual_seed(1)
    first = run(tmp_path / "first", num_steps=3)
    torch.manual_seed(2)
    again = run(tmp_path / "again", num_steps=3)
    other = run(tmp_path / "other", num_steps=3, seed=1)
    assert timeless(rows(first / "metrics.jsonl")) == timeless(rows(again / "metrics.jsonl"))
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert timeless(rows(first / name)) == timeless(rows(again / name))
    assert equal(saved_weights(first), saved_weights(again))
    assert not equal(saved_weights(first), saved_weights(other))
    assert timeless(metrics(first)) != timeless(metrics(other))


@pytest.mark.parametrize("layout", [{"packing": "packed"}, {"packing": "padded"}, {"micro_batch_tokens": 16}])
def test_how_a_batch_is_laid_out_does_not_change_the_run(
    layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several optimiser steps in float64, whose rollouts depend on every earlier update."""
    use(monkeypatch, scripted())
    settings = {"model__precision": "float64", "optimizer__name": "sgd", "optimizer__lr": 0.5, "num_steps": 3}
    first, second = run(tmp_path / "first", **settings), run(tmp_path / "second", **settings, **layout)
    assert [row["loss"] for row in metrics(first)] == pytest.approx([row["loss"] for row in metrics(second)], abs=1e-7)
    assert [row["completion"] for row in rows(first / "rollouts.jsonl")] == [
        row["completion"] for row in rows(second / "rollouts.jsonl")
    ]
    ours, theirs = saved_weights(first), saved_weights(second)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-6
    assert not equal(ours, {name: w.to(ours[name].dtype) for name, w in start_weights(small_config()).items()})


# ------------------------------------------------------------------------------------------------ what an update does


@pytest.mark.long
def test_rewards_rise_where_they_can_be_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward is the share of small letters: a few steps of nothing but sampling and rewards raise it."""

    def letters(prompt: Prompt, text: str) -> float:
        return sum("a" <= character <= "z" for character in text) / 4

    use(monkeypatch, scripted(letters))
    folder = run(tmp_path, num_steps=25, groups_per_step=6, group_size=8, evaluation__num_samples=32)
    content = summary_of(folder)
    assert content["gain"]["reward_mean"]["value"] > 0.3
    assert content["after"]["reward_mean"]["value"] > 0.6


def test_a_batch_of_equal_rewards_changes_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted(lambda prompt, text: 0.5))
    folder = run(tmp_path, preflight__enabled=False)
    line = "no signal, the rewards of every group are equal; no update"
    assert capsys.readouterr().out.splitlines()[1:] == [f"step 1: {line}", f"step 2: {line}"]
    assert equal(saved_weights(folder), start_weights(small_config()))
    for row in metrics(folder):
        assert (row["num_rollouts_trained"], row["zero_std_fraction"]) == (0.0, 1.0)
        assert (row["loss"], row["policy_loss"], row["grad_norm"]) == (0.0, 0.0, 0.0)
        assert (row["reward_mean"], row["sampled_reward_mean"]) == (0.5, 0.5)
        assert (row["reward_std"], row["advantage_mean"], row["advantage_std"]) == (0.0, 0.0, 0.0)
        assert row["entropy"] > 1
        assert row["ess_fraction"] == pytest.approx(1)
        assert row["mismatch_max"] < 1e-4


@pytest.mark.long
def test_momentum_does_not_move_the_policy_in_a_step_without_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step teaches something, the others nothing: its moments must not go on pushing."""
    seen: set[str] = set()

    def first_step_only(prompt: Prompt, text: str) -> float:
        if prompt.id.startswith("train"):
            seen.add(prompt.id)
        return varied(prompt, text) if len(seen) <= 2 else 0.0

    use(monkeypatch, scripted(first_step_only))
    folder = run(tmp_path, num_steps=3, output__save_every=1, output__keep_last=5)
    saved = [
        AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"step-00000{step}" / "policy").state_dict()
        for step in (1, 2, 3)
    ]
    assert not equal(saved[0], start_weights(small_config()))
    assert equal(saved[0], saved[1])
    assert equal(saved[1], saved[2])


@pytest.mark.parametrize(("every", "saved"), [(100, [1, 2, 3]), (0, [3])])
def test_slow_steps_are_saved_each_unless_only_the_end_is(
    every: int, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "SAVE_SECONDS", 0.0)
    use(monkeypatch, scripted())
    folder = run(tmp_path, num_steps=3, output__save_every=every, output__keep_best=False)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [f"step-00000{s}" for s in saved]


@pytest.mark.long
def test_a_kl_penalty_in_the_reward_holds_the_policy_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    algorithm = {"algorithm__kl_in": "reward", "algorithm__kl_estimator": "k1", "algorithm__advantage": "group_center"}
    free = run(tmp_path / "free", num_steps=4)
    held = run(tmp_path / "held", num_steps=4, algorithm__kl_coef=0.5, **algorithm)
    first, *later = metrics(held)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert all(row["kl"] != 0 for row in later)
    assert first["reward_mean"] == pytest.approx(metrics(free)[0]["reward_mean"], abs=1e-5)
    assert later[-1]["reward_mean"] != pytest.approx(later[-1]["reward/value"], abs=1e-3)


@pytest.mark.long
def test_lora_trains_the_adapter_alone_and_saves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    folder = run(tmp_path, model__lora_rank=2, algorithm__kl_coef=0.1)
    policy = folder / "checkpoints" / "step-000002" / "policy"
    assert (policy / "adapter_config.json").is_file()
    assert (policy / "adapter_model.safetensors").stat().st_size < 100_000
    found = metrics(folder)
    assert found[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert found[1]["kl"] > 1e-6


@pytest.mark.long
def test_several_updates_on_a_batch_leave_the_policy_that_sampled_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    once, twice = run(tmp_path / "once"), run(tmp_path / "twice", updates_per_batch=2)
    assert metrics(once)[0]["ratio_max"] == 1.0
    assert metrics(twice)[0]["ratio_max"] > 1.0
    assert not equal(saved_weights(once), saved_weights(twice))


def test_truncated_completions_leave_the_loss_but_not_the_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted())
    folder = run(tmp_path, algorithm__mask_truncated=True, sampling__max_tokens=2, preflight__enabled=False)
    for row in metrics(folder):
        assert row["truncated_fraction"] == 1.0
        assert row["num_rollouts_trained"] == 0.0
        assert row["mean_group_std"] > 0
    assert equal(saved_weights(folder), start_weights(small_config()))
    expected = "step 1: no signal, every completion that could teach something is masked or empty;"
    assert capsys.readouterr().out.splitlines()[1].startswith(expected)


# ------------------------------------------------------------------------------------------------ dropped groups


@pytest.mark.long
def test_dynamic_sampling_refills_the_batch_and_counts_what_it_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_dull(prompt: Prompt, text: str) -> float:
        return varied(prompt, text) if int(prompt.id[-1]) % 2 else 0.0

    use(monkeypatch, scripted(half_dull))
    config = small_config(num_steps=3)
    config.algorithm = replace(preset("dapo"), group_filter_rounds=9)
    folder = run(tmp_path, config)
    found = metrics(folder)
    assert [row["num_groups"] for row in found] == [2.0] * 3
    assert [row["zero_std_fraction"] for row in found] == [0.0] * 3
    refused = sum(row.get("dropped/filtered_all_wrong", 0) for row in found)
    assert refused >= 3
    assert summary_of(folder)["dropped_groups"] == refused


@pytest.mark.long
def test_a_step_of_refused_groups_is_logged_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted(lambda prompt, text: 1.0))
    config = small_config(preflight__enabled=False)
    config.algorithm = preset("dapo")
    folder = run(tmp_path, config)
    for row in metrics(folder):
        assert (row["dropped/filtered_all_right"], row["num_groups_sampled"], row["num_groups"]) == (8.0, 8.0, 0.0)
        assert row["sampled_reward_mean"] == 1.0
        assert {row[name] for name in OF_TRAINED_GROUPS} == {None}
        assert row["entropy"] > 1
        assert row["ess_fraction"] == pytest.approx(1)
        assert row["tokens_per_second"] > 0
    assert summary_of(folder)["tokens"] > 2 * 8 * 4
    kept = rows(folder / "rollouts.jsonl")
    assert {(row["step"], row["reward"], row["advantage"], row["dropped"]) for row in kept} == {
        (step, 1.0, None, "filtered_all_right") for step in (1, 2)
    }
    expected = "step 1: no signal, every group was dropped; no update"
    assert capsys.readouterr().out.splitlines()[1] == expected
    assert summary_of(folder)["status"] == "completed"
    assert equal(saved_weights(folder), start_weights(small_config()))


OF_TRAINED_GROUPS = (
    *("reward_mean", "reward_std", "mean_group_std", "zero_std_fraction", "all_correct_fraction", "all_wrong_fraction"),
    *("unscored_fraction", "completion_length_mean", "completion_length_max", "truncated_fraction", "staleness_max"),
    *("advantage_mean", "advantage_std", "loss", "policy_loss"),
)
"""Null where no group is left to train on."""


@pytest.mark.long
def test_the_logged_reward_is_over_all_samples_before_filtering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def verdict(prompt: Prompt, text: str) -> float:
        reward = varied(prompt, text) if int(prompt.id[-1]) % 2 else 1.0
        given.extend([reward] if prompt.id.startswith("train") else [])
        return reward

    use(monkeypatch, scripted(verdict))
    config = small_config(num_steps=1, preflight__enabled=False)
    config.algorithm = replace(preset("dapo"), group_filter_rounds=1)
    (row,) = metrics(run(tmp_path, config))
    assert row["num_groups"] < row["num_groups_sampled"] == len(given) / 4
    assert row["sampled_reward_mean"] == pytest.approx(sum(given) / len(given))
    assert row["reward_mean"] < row["sampled_reward_mean"]


def test_every_prompt_that_was_drawn_is_trained_or_dropped_for_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: Counter[str] = Counter()

    def verdict(prompt: Prompt, text: str) -> Any:
        judged[prompt.id] += 1
        return {"train-0": Failure("lost"), "train-1": 0.0}.get(prompt.id, varied(prompt, text))

    use(monkeypatch, scripted(verdict))
    config = small_config(num_steps=6)
    config.algorithm = preset("dapo")
    folder = run(tmp_path, config)
    totals = Counter[str]()
    for row in metrics(folder):
        totals.update({k: v for k, v in row.items() if k == "num_groups" or k.startswith("dropped/")})
    drawn = {prompt_id: count // config.group_size for prompt_id, count in judged.items() if "train" in prompt_id}
    refused = sum(count for reason, count in totals.items() if reason.startswith("dropped/filtered"))
    assert totals["num_groups"] + totals["dropped/unscored_groups"] + refused == sum(drawn.values())
    assert totals["dropped/unscored_groups"] == drawn["train-0"] > 0
    assert totals["dropped/unscored_rollouts"] == judged["train-0"]
    assert refused >= drawn["train-1"] > 0
    assert summary_of(folder)["dropped_groups"] == totals["dropped/unscored_groups"] + refused


def test_a_reward_that_fails_always_stops_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(prompt: Prompt, text: str) -> Any:
        return 0.0 if prompt.id.startswith("test") else Failure("no route to the judge")

    use(monkeypatch, scripted(verdict))
    with pytest.raises(RunStopped, match=r"^none of 8 completions could be scored: no route to the judge$"):
        run(tmp_path)
    assert summary_of(tmp_path)["status"] == "failed"
    assert summary_of(tmp_path)["before"] is None  # the first step's answers come before the evaluation


# ------------------------------------------------------------------------------------------------ presets


@pytest.fixture(scope="module", name="untrained")
def _untrained() -> dict[str, Tensor]:
    return start_weights(small_config())


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_preset_trains_through_the_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: dict[str, Tensor]
) -> None:
    use(monkeypatch, scripted())
    config = small_config(group_size=6, groups_per_step=3, evaluation__num_prompts=1, output__rollouts_per_step=0)
    config.algorithm = preset(name)
    folder = run(tmp_path, config)
    for row in metrics(folder):
        assert row["skipped"] == 0.0
        assert row["grad_norm"] > 0
        assert isinstance(row["loss"], float)
    assert not equal(saved_weights(folder), untrained)
