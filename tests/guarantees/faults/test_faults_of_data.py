"""Bad data are named with file and line before anything is trained, or skipped and counted, as data.bad_rows says."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.cli.main import main

from ...support.small import logging_as_it_was, rows, words

REWARD = "def score(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
GOOD = [json.dumps({"prompt": f"number {n}: "}).encode() for n in range(6)]
BROKEN: dict[str, tuple[bytes, str]] = {
    "cut off": (b'{"prompt": "a', "is not JSON"),
    "no object": (b'"prompt"', "is not an object with columns but str"),
    "not UTF-8": (b'{"prompt": "\xc3\x28"}', "is not UTF-8 (byte 12)"),
    "half a character": (rb'{"prompt": "\ud83d"}', "has half of a surrogate pair"),
    "another column": (b'{"question": "a"}', "has no column 'prompt' (has: question)"),
    "no prompt": (b'{"prompt": null}', "column 'prompt' is null"),
    "an empty prompt": (b'{"prompt": ""}', "has an empty prompt"),
    "an unknown role": (
        b'{"prompt": [{"role": "human", "content": "?"}]}',
        "has a prompt with the unknown role 'human'",
    ),
    "an answer in the prompt": (
        b'{"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}',
        "has a prompt that ends with the assistant's message (data.answer_column=NAME ",
    ),
    "10 MB": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', "has 10.0 MB, more than 4.2 MB"),
    "nested beyond reason": (b"[" * 100_000, "is not JSON"),
}


@pytest.fixture(autouse=True)
def _bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test runs in a folder of its own, with a reward, and leaves logging as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("COVEY_DEBUG", raising=False)
    (tmp_path / "length_reward.py").write_text(REWARD)
    with logging_as_it_was():
        yield


def covey_train(*more: str, **settings: object) -> int:
    """`covey train` on rows.jsonl in this process; its exit status."""
    own = ["environment=reward_functions", "rewards=[length_reward:score]", "environment.in_process=true"]
    folders = ["data.path=rows.jsonl", "hydra.run.dir=run", "output.progress=false"]
    return main(["train", *words(evaluation__num_prompts=1, **settings), *own, *folders, *more])


def refusal(captured: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    (line,) = captured.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_line_is_refused_with_file_and_line_before_anything_is_trained(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, problem = BROKEN[name]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([*GOOD[:3], line, *GOOD[3:]]))
    assert covey_train() == 2
    found = refusal(capsys)
    assert found.startswith(f"covey: rows.jsonl line 4 {problem}")
    assert found.endswith("; data.bad_rows=skip leaves such rows out")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_broken_lines_are_skipped_and_counted_where_that_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line, _ in BROKEN.values()]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([*lines[:3], *GOOD, *lines[3:]]))
    assert covey_train("data.bad_rows=skip", num_steps=5) == 0
    assert f"WARNING: rows.jsonl: {len(lines)} broken rows skipped" in capsys.readouterr().err
    seen = {row["prompt"] for row in rows(tmp_path / "run" / "rollouts.jsonl")}
    assert seen <= {f"number {n}: " for n in range(6)}
    assert len(seen) == 5, "one row of six is held out"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "rows.jsonl is empty"),
        (b"\n\n", "rows.jsonl has no usable rows for split train (0 broken)"),
        (b"\n".join(line for line, _ in BROKEN.values()), "rows.jsonl has no usable rows for split train (11 broken)"),
    ],
    ids=["empty", "blank", "all broken"],
)
def test_data_without_a_usable_row_are_refused_even_where_broken_ones_are_skipped(
    content: bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert covey_train("data.bad_rows=skip") == 2
    assert refusal(capsys) == f"covey: {line}"


LONG = json.dumps({"prompt": "long " * 1000}).encode()
"""5,000 bytes, each a token of the nano policy, which has 4,096 positions."""


@pytest.mark.parametrize("preflight", ["true", "false"])
def test_a_prompt_too_long_for_the_policy_is_refused_by_its_id(
    preflight: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([LONG, *GOOD]))
    assert covey_train(f"preflight.enabled={preflight}", "shuffle=false") == 2
    line = [line for line in capsys.readouterr().err.splitlines() if line.startswith("covey: ")][-1]
    assert "train-0" in line
    assert "5,000" in line or "5000" in line
    assert preflight == "false" or "leave long prompts out of the data: data.bad_rows=skip does" in line


def test_rows_that_are_all_too_long_are_skipped_and_no_prompt_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([LONG.replace(b"long", b"lon%d" % n) for n in range(8)]))
    assert covey_train("data.bad_rows=skip") == 2
    found = capsys.readouterr().err
    assert "prompts of more than 4092 tokens skipped: train-" in found
    assert found.endswith("covey: environment=reward_functions has no training prompts\n")
    assert "chat template" not in found


@pytest.mark.long
def test_too_long_prompts_are_skipped_named_and_counted_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([*GOOD[:4], LONG, LONG.replace(b"long", b"LONG"), *GOOD[4:]]))
    assert covey_train("data.bad_rows=skip", num_steps=4) == 0
    found = capsys.readouterr().err
    assert "prompts of more than 4092 tokens skipped: train-" in found
    prompts = {row["prompt"] for row in rows(tmp_path / "run" / "rollouts.jsonl")}
    assert prompts <= {f"number {n}: " for n in range(6)}
