"""traces.jsonl and updates.jsonl: what they say of a step is what the trainer found, and nothing else changes."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from covey.config.schema import Config
from covey.loop import train
from covey.system import collectives
from covey.types import Failure, Group, Prompt
from covey_report.traces.log import EVENLY, Speller, TraceGroup, _sequence, choose, is_traced, rows_of_ranks
from covey_report.traces.token_scores import RowScores, TrainedRow
from covey_report.traces.updates import LOG_RATIO_EDGES, count_in_bins, fitting

from ...support.processes import on_two_ranks
from ...support.small import (
    POLICIES,
    TOKENIZER,
    group,
    rows,
    saved_policy,
    scripted,
    scripted_for,
    small_config,
    timeless,
    use,
)


def run(folder: Path, **changes: Any) -> Path:
    train(small_config(**changes), folder)
    return folder


def tokens_of(folder: Path) -> list[dict[str, Any]]:
    return [rollout["tokens"] for row in rows(folder / "traces.jsonl") for rollout in row["rollouts"]]


@pytest.mark.long
@pytest.mark.parametrize("kind", POLICIES)
def test_a_run_with_traces_ends_with_the_same_bits_as_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    changes = POLICIES[kind] | {"updates_per_batch": 2, "algorithm__kl_coef": 0.1, "num_steps": 3}
    found = []
    for traces in (True, False):
        use(monkeypatch, scripted_for(kind))
        folder = run(tmp_path / str(traces), output__traces=traces, **changes)
        found.append((saved_policy(folder), timeless(rows(folder / "metrics.jsonl"))))
    (with_weights, with_rows), (weights, without_rows) = found
    assert all(torch.equal(with_weights[name], weights[name]) for name in weights)
    assert with_rows == without_rows
    assert (tmp_path / "True" / "traces.jsonl").is_file()
    assert not {"traces.jsonl", "updates.jsonl"} & {path.name for path in (tmp_path / "False").iterdir()}


def test_every_token_of_an_answer_has_the_numbers_that_the_step_logs_means_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    folder = run(tmp_path, num_steps=1, output__traced_groups=9, algorithm__kl_coef=0.1, updates_per_batch=2)
    (step,) = rows(folder / "metrics.jsonl", "train")
    found = tokens_of(folder)
    assert len(found) == 8
    entropies = [value for tokens in found for value in tokens["entropy"]]
    assert sum(entropies) / len(entropies) == pytest.approx(step["first_update/entropy"], rel=1e-3)
    assert max(ratio for tokens in found for ratio in tokens["ratio"]) == pytest.approx(step["ratio_max"], rel=1e-3)
    for tokens in found:
        assert all(tokens["learnt"])
        assert tokens["sampler_logprob"] == pytest.approx(tokens["trainer_logprob"], rel=1e-3)
        assert tokens["kl"] == [0.0] * len(tokens["ids"])  # the reference is the policy that this step begins with


@pytest.mark.long
def test_the_pieces_of_an_answer_are_its_text_and_its_stop_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    folder = run(tmp_path)
    for row in rows(folder / "traces.jsonl"):
        for rollout in row["rollouts"]:
            pieces = rollout["tokens"]["pieces"]
            assert (TOKENIZER.eos_token in pieces) == (rollout["finish_reason"] == "stop")
            if "\ufffd" not in rollout["completion"]:
                text = "".join(piece for piece in pieces if piece not in TOKENIZER.all_special_tokens)
                assert text == rollout["completion"]


@pytest.mark.long
def test_a_masked_policy_has_its_whole_text_with_numbers_where_it_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted_for("masked"))
    folder = run(tmp_path, num_steps=1, **POLICIES["masked"])
    for row in rows(folder / "traces.jsonl"):
        for rollout in row["rollouts"]:
            tokens = rollout["tokens"]
            learnt = tokens["learnt"]
            assert sum(learnt) == rollout["num_tokens"] == row["prompt"].count("<mask>")
            assert [value is not None for value in tokens["sampler_logprob"]] == learnt
            around = "".join(piece for piece, is_own in zip(tokens["pieces"], learnt, strict=True) if not is_own)
            assert row["prompt"].replace("<mask>", "") in around


@pytest.mark.long
def test_histograms_count_every_token_and_every_rollout_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    folder = run(tmp_path, algorithm__kl_coef=0.1)  # so that rows without advantage are scored too
    steps = rows(folder / "metrics.jsonl", "train")
    for row, step in zip(rows(folder / "updates.jsonl"), steps, strict=True):
        assert row["step"] == step["step"]
        totals = {name: sum(found["counts"]) for name, found in row["histograms"].items()}
        num_tokens = round(8 * step["completion_length_mean"])
        assert totals == dict.fromkeys(("reward", "advantage", "length"), 8) | dict.fromkeys(
            ("mismatch", "log_ratio", "entropy"), num_tokens
        )
        rewards = [reward for one in row["groups"] for reward in one["rewards"]]
        assert sum(rewards) / 8 == pytest.approx(step["sampled_reward_mean"])


@pytest.mark.long
def test_a_resumed_run_has_each_step_once_in_its_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"num_steps": 4, "output__save_every": 2}
    use(monkeypatch, scripted())
    whole = run(tmp_path / "whole", **changes)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000004")
    use(monkeypatch, scripted())
    resumed: Config = small_config(**changes)
    resumed.resume = str(cut)
    train(resumed, cut)
    for name in ("traces.jsonl", "updates.jsonl"):
        assert timeless(rows(cut / name)) == timeless(rows(whole / name))


@pytest.mark.long
def test_the_files_stay_below_their_bytes_and_the_last_step_still_has_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    folder = run(tmp_path, num_steps=6, output__max_trace_bytes=30_000)
    for name in ("traces.jsonl", "updates.jsonl"):
        assert (folder / name).stat().st_size <= 30_000
        assert rows(folder / name)[-1]["step"] == 6


def test_groups_are_chosen_for_the_reason_they_are_largest_in_and_the_rest_evenly() -> None:
    alike = [candidate(f"alike {index}", 0.5, 0.5) for index in range(6)]
    wide = candidate("wide", 0.0, 1.0)
    mismatched = candidate("mismatched", 0.0, 0.5, gap=0.3)
    failed = TraceGroup(Group(Prompt("failed", "test", "?", {}), (), (Failure("lost"),)), [], None)
    chosen = choose([*alike, mismatched, wide, failed], 5)
    assert [(one.group.prompt.id, reason) for one, reason in chosen] == [
        ("failed", "a failure"),
        ("wide", "largest spread of rewards"),
        ("mismatched", "largest mismatch"),
        ("alike 0", EVENLY),
        ("alike 3", EVENLY),
    ]
    assert choose([wide], 3) == [(wide, "largest spread of rewards")]


def candidate(name: str, *rewards: float, gap: float = 0.0) -> TraceGroup:
    return TraceGroup(group(*rewards, prompt_id=name), [0.0] * len(rewards), None, gap)


def test_values_outside_the_edges_count_at_the_ends_and_nan_nowhere() -> None:
    values = torch.tensor([-9.0, 0.0, 0.5, 9.0, torch.nan])
    counts = count_in_bins(values, LOG_RATIO_EDGES)
    assert (counts[0], counts[10], counts[19], sum(counts)) == (1, 1, 2, 4)


def test_as_many_groups_are_listed_as_there_is_room_for_evenly_spread() -> None:
    groups = [{"prompt_id": f"train-{index}", "rewards": [0.0] * 8} for index in range(100)]
    found = fitting(groups, 2500 + 10 * 80)
    assert [one["prompt_id"] for one in found] == [f"train-{index}" for index in range(0, 100, 10)]
    assert fitting(groups, 0) == []


def test_the_first_the_last_and_every_nth_step_are_traced() -> None:
    assert [step for step in range(1, 12) if is_traced(step, 11, 4)] == [1, 4, 8, 11]


def test_a_character_of_several_tokens_stands_at_its_last_token() -> None:
    ids = TOKENIZER("a\u3871b", add_special_tokens=False).input_ids
    assert len(ids) == 5
    assert Speller(TOKENIZER)(ids) == ["a", "", "", "\u3871", "b"]
    assert Speller(TOKENIZER)(ids[:3]) == ["a", "\ufffd", ""]
    assert Speller(TOKENIZER)([]) == []


def test_of_branches_what_is_read_again_before_the_first_chosen_token_is_left_out() -> None:
    (plain,) = group(1.0).rollouts  # the prompt 5, 6 and the tokens 8, 8
    ids, targets = (*plain.input_ids, 5, 30, 31), (*plain.target_ids, 30, 31, 7)
    mask, logprobs = (*plain.loss_mask, False, False, True), (*plain.sampler_logprobs, 0.0, 0.0, -1.0)
    branched = replace(
        plain, input_ids=ids, target_ids=targets, loss_mask=mask, sampler_logprobs=logprobs, branches=(0, 3)
    )
    assert _sequence(branched) == ([8, 8, 7], [0, 1, 2])
    between = replace(branched, loss_mask=(False, True, False, True, False, True))
    assert _sequence(between) == ([8, 8, 30, 31, 7], [0, 2, 4])


class Trained(NamedTuple):
    """What a rank trained: the answers by prompt, in place of a step's scores."""

    answers: Mapping[str, tuple[int, ...]]

    def rows(self, prompt_ids: Iterable[str]) -> Iterator[TrainedRow]:
        for name in prompt_ids:
            if name in self.answers:
                yield name, self.answers[name], RowScores([-0.5], [1.0], None, None)


def _rows_of_this_rank() -> list[tuple[str, tuple[int, ...]]]:
    answers = ({"a": (1, 2), "b": (3,)}, {"a": (4,), "c": (5,)})[collectives.rank()]
    wanted = (["a", "b"], ["c"])[collectives.rank()]
    return [row[:2] for row in rows_of_ranks(wanted, Trained(answers))]  # type: ignore[arg-type] # its rows alone are read


def test_rank_0s_groups_have_token_numbers_from_any_training_rank(tmp_path: Path) -> None:
    for found in on_two_ranks(_rows_of_this_rank, tmp_path):
        assert found == [("a", (1, 2)), ("b", (3,)), ("a", (4,))]
