"""What was sampled comes back from the journal as it was, whatever happened to its files, and nothing else does."""

import asyncio
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from covey.engine.fake import FakeEngine
from covey.policy.models.nano import nano_tokenizer
from covey.rollouts.attempt import Attempt, Segment, to_segment
from covey.rollouts.rollout import roll_out, runs_of
from covey.rollouts.sampler import Sampler
from covey.rollouts.saved.journal import KeptGroup, RolloutJournal, journal_files
from covey.rollouts.saved.plain import Piece
from covey.system.disk import WriteError
from covey.types import Completion, Failure, Group, Prompt, Reward, Sampling, Span, Turn
from tests.support.scripted import Scripted

PROMPT = Prompt("p", "scripted", "ab:", {})
SAMPLING = Sampling(seed=5, max_tokens=6, stop=("x",))
TOKENIZER = nano_tokenizer()
COMPLETION = Completion((8, 300, 2), (-1 / 3, -0.5, -5e-324), "stop", 3, spans=(Span(2, 0, 1), Span(3, 1, 3)))
ATTEMPT = Attempt(
    [[Segment((5, 6), "prompt", 0), to_segment(COMPLETION, 1)], [Segment((9,), "tool", 1)]],
    version=2,
    messages=[{"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}],
    turns=[Turn(0, 3, reward=0.5, state="s", info={"noted": [1, "b"]})],
    stop_reason="max_turns",
    verdict=Reward(0.25, {"right": 0.25}, {"why": "no"}),
)
VERDICTS = (Reward(1.0, {"right": 1.0}), Failure("late", is_fault=False, num_tokens=3))
PARTS: list[tuple[str, int, Any]] = [
    ("completion", 0, COMPLETION),
    ("completion", 2, replace(COMPLETION, spans=())),
    ("attempt", 1, ATTEMPT),
    ("attempt", 3, Failure("broke")),
    ("verdicts", 0, VERDICTS),
    ("end", 0, None),
]


def opened(folder: Path, identity: str = "i" * 64, **how: Any) -> RolloutJournal:
    return RolloutJournal(folder, identity, 512, **how)


def group_of(journal: RolloutJournal, prompt: Prompt = PROMPT) -> KeptGroup:
    return journal.group("0", prompt, SAMPLING)


def written(folder: Path, parts: Sequence[tuple[str, int, Any]] = PARTS) -> Path:
    """A journal with a group of these parts; its one file."""
    journal = opened(folder)
    kept = group_of(journal)
    for part in parts:
        kept.add(*part)
    journal.close()
    (file,) = journal_files(folder)
    return file


def found_in(folder: Path, **how: Any) -> KeptGroup:
    journal = opened(folder, **how)
    try:
        return group_of(journal)
    finally:
        journal.close()


def test_a_group_comes_back_as_it_was(tmp_path: Path) -> None:
    written(tmp_path / "journal")
    found = found_in(tmp_path / "journal")
    assert found.completions == {0: COMPLETION, 2: replace(COMPLETION, spans=())}
    assert found.completions[0].spans == COMPLETION.spans
    assert found.attempts == {1: ATTEMPT, 3: Failure("broke")}
    assert found.verdicts == VERDICTS
    assert (found.verdicts[0], found.attempts[1]) == (VERDICTS[0], ATTEMPT)


def test_a_group_of_other_weights_prompts_or_sampling_is_another(tmp_path: Path) -> None:
    written(tmp_path / "journal")
    journal = opened(tmp_path / "journal")
    others = [
        journal.group("1", PROMPT, SAMPLING),
        journal.group("0", replace(PROMPT, id="q"), SAMPLING),
        journal.group("0", PROMPT, replace(SAMPLING, seed=6)),
        journal.group("0", PROMPT, replace(SAMPLING, temperature=0.0)),
    ]
    assert [other.completions for other in others] == [{}] * 4
    assert journal.group("0", PROMPT, replace(SAMPLING, first_sample=3)).completions  # a part of the same group
    journal.close()


def test_an_unfinished_answer_comes_back_in_pieces(tmp_path: Path) -> None:
    for told in ((5, 6), (5, 6, 7), (5, 6, 7), (5, 6, 7, 8)):
        journal = opened(tmp_path)
        group_of(journal).add_begun(1, told)  # each by a process of its own, which knows what came before
        journal.close()
    assert found_in(tmp_path).begun == {1: (5, 6, 7, 8)}
    (file,) = journal_files(tmp_path)
    assert file.read_bytes().count(b" piece 1 ") == 3


def test_a_piece_behind_a_lost_one_is_left_out(tmp_path: Path) -> None:
    pieces = [("piece", 1, Piece(0, (5, 6))), ("piece", 1, Piece(2, (7,))), ("piece", 1, Piece(5, (9,)))]
    written(tmp_path, pieces)
    assert found_in(tmp_path).begun == {1: (5, 6, 7)}


def test_a_line_is_there_for_a_process_that_is_killed_right_after(tmp_path: Path) -> None:
    journal = opened(tmp_path / "journal")
    group_of(journal).add("completion", 0, COMPLETION)
    until = time.monotonic() + 0.5
    while (
        not journal_files(tmp_path / "journal")
        or b"completion" not in journal_files(tmp_path / "journal")[0].read_bytes()
    ):
        assert time.monotonic() < until, "not written within half a second"
        time.sleep(0.01)
    journal.close()


def test_an_end_torn_at_any_byte_is_cut_and_written_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = written(tmp_path / "whole").read_bytes()
    ends = [end for end, byte in enumerate(whole, 1) if byte == ord("\n")]
    for size in range(len(whole)):
        folder = tmp_path / f"cut-{size}"
        folder.mkdir()
        file = folder / "step-000000.0.log"
        file.write_bytes(whole[:size])
        journal = opened(folder)
        found = group_of(journal)
        num_lines = sum(end <= size for end in ends)
        assert len(found.completions) + len(found.attempts) + bool(found.verdicts) == min(5, max(0, num_lines - 1)), (
            size
        )
        found.add("completion", 7, COMPLETION)
        journal.close()
        assert found_in(folder).completions[7] == COMPLETION, size
    assert "damaged" not in caplog.text


def test_a_damaged_line_is_found_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path / "journal")
    content = bytearray(file.read_bytes())
    place = content.index(b"attempt 1")
    for offset in (place, place + 40, content.index(b"\n", place)):
        file.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        caplog.clear()
        found = found_in(tmp_path / "journal")
        assert (set(found.completions), 1 in found.attempts) == ({0, 2}, False)
        assert f"line 4 of {file}" in caplog.text
        assert "damaged (the checksum differs); what it held is sampled again" in caplog.text
        for left in journal_files(tmp_path / "journal"):
            left.write_bytes(content)


def sealed(kind: str, number: int, content: str, key: str) -> bytes:
    """A line with a right checksum, as a stranger can write it."""
    text = f"1.0 {key} {kind} {number} {content}".encode()
    return f"{xxhash.xxh3_64_hexdigest(text)} ".encode() + text + b"\n"


PLAIN = {"token_ids": [8, 2], "logprobs": [-0.5, -0.5], "finish_reason": "stop", "policy_version": 0}
FOREIGN: dict[str, str] = {
    "a token beyond the vocabulary": json.dumps(PLAIN | {"token_ids": [8, 512]}),
    "a token below 0": json.dumps(PLAIN | {"token_ids": [-1, 2]}),
    "lists of two lengths": json.dumps(PLAIN | {"logprobs": [-0.5]}),
    "text for a number": json.dumps(PLAIN | {"policy_version": "0"}),
    "another reason": json.dumps(PLAIN | {"finish_reason": "why"}),
    "another field": json.dumps(PLAIN | {"__class__": "os.system"}),
    "a field too few": json.dumps({"token_ids": [8]}),
    "no object": "[1, 2]",
    "no JSON": "{",
    "no number of JSON's": json.dumps(PLAIN | {"policy_version": float("nan")}),
    "brackets without end": "[" * 100_000,
    "packed numbers of an unknown kind": json.dumps(PLAIN | {"token_ids": "Pabcd"}),
    "packed numbers that are none": json.dumps(PLAIN | {"token_ids": "i***"}),
    "packed numbers that end too early": json.dumps(PLAIN | {"token_ids": "iAAA="}),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_a_stranger_writes_is_checked(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path / "journal", PARTS[1:2])
    key = file.read_text().split()[2]
    with file.open("ab") as lines:
        lines.write(sealed("completion", 0, FOREIGN[name], key))
        lines.write(sealed("completion", 1, json.dumps(PLAIN), key))
        lines.write(sealed("unknown", 3, "{}", key))
    assert set(found_in(tmp_path / "journal").completions) == {1, 2}
    assert "is no completion" in caplog.text


def test_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "other")
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / file.name).symlink_to(file)
    with pytest.raises(ValueError, match="is a link, not a file"):
        opened(tmp_path / "journal")


def test_a_journal_of_other_settings_is_not_used_and_says_so(tmp_path: Path) -> None:
    written(tmp_path / "journal")
    journal = opened(tmp_path / "journal", "j" * 64)
    assert group_of(journal).completions == {}
    assert journal.found == "the journal was written with other settings, prompts or code and is not used"
    journal.close()


def test_the_journal_says_what_it_holds_and_how_many_seconds_are_lost(tmp_path: Path) -> None:
    file = written(tmp_path / "journal", PARTS[:3])
    last = float(file.read_text().splitlines()[-1].split()[1])
    os.utime(file, (last + 1.25, last + 1.25))
    journal = opened(tmp_path / "journal")
    journal.close()
    told = "the journal holds 3 answers, and {} of 1 groups whole (an evaluated prompt has two): they are not sampled "
    told += "again; {} s of sampling are lost"
    assert journal.found == told.format(0, 1.2)
    file = written(tmp_path / "ended")
    os.utime(file, (last + 50, last + 50))  # it trained meanwhile
    journal = opened(tmp_path / "ended")
    journal.close()
    assert journal.found.endswith(
        "and 1 of 1 groups whole (an evaluated prompt has two): they are not sampled again; 0.0 s of sampling are lost"
    )


def test_a_journal_without_a_finished_answer_does_not_speak_of_answers(tmp_path: Path) -> None:
    written(tmp_path / "journal", ())
    journal = opened(tmp_path / "journal")
    journal.close()
    assert re.fullmatch(r"the journal holds no finished answer; \d+\.\d s of sampling are lost", journal.found)


def test_what_a_checkpoint_holds_is_dropped(tmp_path: Path) -> None:
    journal = opened(tmp_path / "journal")
    for step in range(4):
        journal.begin(step)
        journal.group(str(step), PROMPT, SAMPLING).add("completion", 0, COMPLETION)
    journal.forget_before(2)
    assert [path.name for path in journal_files(tmp_path / "journal")] == ["step-000002.0.log", "step-000003.0.log"]
    journal.group("3", PROMPT, SAMPLING).add("completion", 1, COMPLETION)
    journal.close()
    later = opened(tmp_path / "journal", step=3)
    assert later.group("2", PROMPT, SAMPLING).completions == {}
    assert len(later.group("3", PROMPT, SAMPLING).completions) == 2
    later.begin(3)
    later.forget_before(4)
    later.close()
    assert not (tmp_path / "journal").exists()


def test_a_rank_drops_its_own_files_and_those_of_ranks_that_are_gone(tmp_path: Path) -> None:
    for rank in range(3):
        journal = opened(tmp_path / "journal", place=(rank, 3))
        journal.group("0", PROMPT, SAMPLING).add("completion", rank, COMPLETION)
        journal.close()
    first, second = (opened(tmp_path / "journal", place=(rank, 2)) for rank in range(2))
    assert [set(group_of(one).completions) for one in (first, second)] == [{0, 1, 2}] * 2
    first.forget_before(1)
    assert [path.name for path in journal_files(tmp_path / "journal")] == ["step-000000.1.log"]
    second.forget_before(1)
    for one in (first, second):
        one.close()


def test_metrics_of_a_finished_step_come_back(tmp_path: Path) -> None:
    journal = opened(tmp_path / "journal")
    journal.begin(4)
    assert [journal.metrics({"cost": cost}) for cost in (1.0, 2.0)] == [{"cost": 1.0}, {"cost": 2.0}]
    journal.close()
    again = opened(tmp_path / "journal")
    again.begin(4)
    assert [again.metrics({}) for _ in range(3)] == [{"cost": 1.0}, {"cost": 2.0}, {}]
    again.begin(5)
    assert again.metrics({"cost": 3.0}) == {"cost": 3.0}
    again.close()


def test_a_disk_that_refuses_lines_stops_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("in the way")
    journal = opened(tmp_path / "journal")
    group_of(journal)
    with pytest.raises(WriteError, match=r"^cannot write \S+/journal: "):
        journal.close()


# ----------------------------------------------------------------------------------------------- groups that are kept


def engine() -> FakeEngine:
    return FakeEngine(lambda prompt_ids, index: (10 + index, 11, 2), 64)


class Counts(Scripted):
    """Counts the completions it scores."""

    num_scored = 0

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        self.num_scored += len(completions)
        return await super().score(prompt, completions)


def sampled(folder: Path, environment: Scripted, num_samples: int = 5) -> tuple[Group, FakeEngine]:
    fake, journal = engine(), opened(folder)
    kept = group_of(journal)
    group = asyncio.run(roll_out(Sampler(fake, environment, TOKENIZER), PROMPT, num_samples, SAMPLING, kept=kept))
    journal.close()
    return group, fake


def varied() -> Counts:
    return Counts({"train": ["ab:"], "test": []}, lambda prompt, text: len(text) / 4)


def test_a_group_that_is_kept_is_neither_sampled_nor_scored(tmp_path: Path) -> None:
    first, _ = sampled(tmp_path / "journal", varied())
    again = varied()
    second, fake = sampled(tmp_path / "journal", again)
    assert (second, fake.calls, again.num_scored) == (first, [], 0)


def without(lines: list[bytes], *words: bytes) -> bytes:
    return b"".join(line for line in lines if not any(word in line for word in words))


def test_only_missing_samples_are_drawn_and_they_are_the_same(tmp_path: Path) -> None:
    first, _ = sampled(tmp_path / "journal", varied())
    (file,) = journal_files(tmp_path / "journal")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(without(lines, b"completion 1 ", b"completion 2 ", b"completion 4 ", b"verdicts", b" end "))
    again = varied()
    second, fake = sampled(tmp_path / "journal", again)
    assert second == first
    assert [(n, sampling.first_sample) for _, n, sampling in fake.calls] == [(2, 1), (1, 4)]
    assert again.num_scored == 5


def test_verdicts_of_another_number_of_answers_are_asked_for_again(tmp_path: Path) -> None:
    sampled(tmp_path / "journal", varied(), num_samples=3)
    again = varied()
    group, fake = sampled(tmp_path / "journal", again, num_samples=5)
    assert (len(group.rollouts), again.num_scored, [n for _, n, _ in fake.calls]) == (5, 5, [2])


@pytest.mark.parametrize(("numbers", "runs"), [([], []), ([0, 1, 4], [range(2), range(4, 5)]), ([3], [range(3, 4)])])
def test_missing_numbers_are_drawn_by_runs(numbers: list[int], runs: list[range]) -> None:
    assert runs_of(numbers) == runs
