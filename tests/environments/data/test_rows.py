"""Rows from files, directories, the hub and memory; bad data is one line that names its place."""

import json
import logging
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest

from covey.environments.data.rows import RowSettings, load_rows

NEEDS_PROMPT = RowSettings(columns=("prompt",))


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count: int, start: int = 0) -> list[dict]:
    return [{"prompt": f"question {i}", "answer": i} for i in range(start, start + count)]


def message(path: str | None, settings: RowSettings | None = None) -> str:
    with pytest.raises(ValueError) as error:
        load_rows(path, settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_one_file_is_divided_the_same_way_every_time(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", rows(50))
    first = load_rows(path)
    assert len(first.splits["train"]) == 45
    assert len(first.splits["test"]) == 5
    assert load_rows(path) == first
    assert sorted(row["answer"] for split in first.splits.values() for row in split) == list(range(50))
    least = load_rows(write(tmp_path / "two.jsonl", rows(2)), RowSettings(test_fraction=0.9)).splits
    assert (len(least["train"]), len(least["test"])) == (1, 1)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", rows(50))
    assert load_rows(str(tmp_path / "folder"), RowSettings(test_split="train")) == first


def test_what_is_held_out_depends_on_the_content_not_on_the_order(tmp_path: Path) -> None:
    forward = load_rows(write(tmp_path / "a.jsonl", rows(50)))
    backward = load_rows(write(tmp_path / "b.jsonl", rows(50)[::-1]))
    assert forward.splits["test"] == backward.splits["test"][::-1]


def test_equal_prompts_are_held_out_together_and_data_without_them_are_divided_as_ever(tmp_path: Path) -> None:
    by_prompt = RowSettings(prompt_columns=("prompt",), test_fraction=0.2)
    several = [{**row, "answer": 10 * row["answer"] + turn} for turn in range(3) for row in rows(20)]
    found = load_rows(write(tmp_path / "several.jsonl", several), by_prompt).splits
    prompts = {split: {row["prompt"] for row in found[split]} for split in found}
    assert (len(found["train"]), len(found["test"])) == (48, 12)
    assert prompts["train"].isdisjoint(prompts["test"])
    once = load_rows(write(tmp_path / "once.jsonl", rows(20)), by_prompt).splits
    assert [row["answer"] for row in once["test"]] == [8, 9, 13, 17]  # those with the lowest SHA-256


def test_rows_of_a_prompt_too_frequent_for_the_test_split_are_trained_on(tmp_path: Path) -> None:
    by_prompt = RowSettings(prompt_columns=("prompt",))
    given = [{"prompt": "often", "answer": i} for i in range(17)] + [{"prompt": "twice", "answer": i} for i in (0, 1)]
    found = load_rows(write(tmp_path / "data.jsonl", [*given, {"prompt": "a"}]), by_prompt).splits
    assert {row["prompt"] for row in found["train"]} >= {"often"}
    pairs = [{"prompt": prompt, "answer": i} for prompt in "ab" for i in range(3)]
    halves = load_rows(write(tmp_path / "pairs.jsonl", pairs), by_prompt).splits
    assert [len({row["prompt"] for row in halves[split]}) for split in halves] == [1, 1]
    same = write(tmp_path / "same.jsonl", given[:17])
    assert message(same, by_prompt) == (
        "cannot hold out test rows of 17 rows with the same prompt; "
        "give a test split: data.path=FOLDER with train.* and test.* files"
    )


MODULE = """
def listed(): return [{"prompt": f"question {i}", "answer": i} for i in range(10)]
def lazy(): return iter(listed())
def split(): return {"train": listed()[:3], "test": listed()[3:5], "extra": listed()}
def broken(): return [*listed(), 3]
def number(): return 3
"""


def test_rows_may_come_from_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("listed", "lazy"):
        found = load_rows(f"my_rows:{name}", NEEDS_PROMPT).splits
        assert [len(found[split]) for split in ("train", "test")] == [9, 1]
    assert load_rows("my_rows:split", NEEDS_PROMPT).splits == {"train": rows(3), "test": rows(2, start=3)}
    assert message("my_rows:broken").startswith(
        "my_rows:broken split train row 11 is not an object with columns but int"
    )
    assert message("my_rows:number") == "my_rows:number must return rows, or splits of rows by name, got int"
    assert message("my_rows:nobody") == "module my_rows must define the function nobody (my_rows:nobody)"
    assert message("no_such_module:f") == "no_such_module:f needs module no_such_module, which cannot be imported"


def test_a_directory_has_a_file_for_each_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows(3))
    write(tmp_path / "test.jsonl", rows(2, start=10))
    found = load_rows(str(tmp_path)).splits
    assert found == {"train": rows(3), "test": rows(2, start=10)}


def test_a_directory_without_a_test_file_holds_rows_out(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows(10))
    found = load_rows(str(tmp_path)).splits
    assert (len(found["train"]), len(found["test"])) == (9, 1)


def test_splits_can_have_other_names(tmp_path: Path) -> None:
    write(tmp_path / "main.jsonl", rows(3))
    write(tmp_path / "held.jsonl", rows(2, start=3))
    found = load_rows(str(tmp_path), RowSettings(train_split="main", test_split="held")).splits
    assert (len(found["train"]), len(found["test"])) == (3, 2)


def test_json_lines_may_be_called_json(tmp_path: Path) -> None:
    assert len(load_rows(write(tmp_path / "data.json", rows(10))).splits["train"]) == 9


@pytest.mark.parametrize("shuffle_rows", [True, False])
@pytest.mark.parametrize("has_test_split", [True, False])
def test_max_rows_takes_rows_at_random_or_from_the_start(
    shuffle_rows: bool, has_test_split: bool, tmp_path: Path
) -> None:
    write(tmp_path / "train.jsonl", rows(200))
    if has_test_split:
        write(tmp_path / "test.jsonl", rows(100, start=200))
    path = str(tmp_path if has_test_split else tmp_path / "train.jsonl")
    whole = load_rows(path).splits
    found = load_rows(path, RowSettings(max_rows=10, shuffle_rows=shuffle_rows)).splits
    for split, of_split in found.items():
        numbers = [row["answer"] for row in of_split]
        everything = [row["answer"] for row in whole[split]]
        assert numbers == sorted(numbers)
        assert set(numbers) <= set(everything)
        assert len(numbers) == 10
        assert (numbers == everything[:10]) != shuffle_rows
        assert (max(numbers) > everything[len(everything) // 2]) == shuffle_rows
    assert load_rows(path, RowSettings(max_rows=10, shuffle_rows=shuffle_rows)).splits == found


def test_a_random_choice_of_rows_follows_from_their_content_not_from_their_order(tmp_path: Path) -> None:
    few = RowSettings(max_rows=10)
    forward = load_rows(write(tmp_path / "a.jsonl", rows(300)), few)
    backward = load_rows(write(tmp_path / "b.jsonl", rows(300)[::-1]), few)
    for split in forward.splits:
        assert forward.splits[split] == backward.splits[split][::-1]


@pytest.mark.long
def test_few_rows_of_a_large_file_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(3000):
            file.write(json.dumps({"prompt": f"question {number}", "text": "x" * 20_000}) + "\n")
    tracemalloc.start()
    found = load_rows(str(path), RowSettings(max_rows=10, prompt_columns=("prompt",))).splits
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(found[split]) for split in found] == [10, 10]
    assert peak < 5_000_000 < path.stat().st_size / 10


def test_training_rows_with_a_prompt_of_the_test_split_are_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_prompt = RowSettings(prompt_columns=("prompt",))
    write(tmp_path / "train.jsonl", [*rows(3), {"prompt": "question 10", "answer": "another"}])
    write(tmp_path / "test.jsonl", rows(2, start=10))
    with caplog.at_level(logging.WARNING):
        found = load_rows(str(tmp_path), by_prompt).splits
    assert found == {"train": rows(3), "test": rows(2, start=10)}
    assert caplog.messages == ["rows of split train left out because split test has their prompts too: 1"]
    write(tmp_path / "train.jsonl", rows(2, start=10))
    assert message(str(tmp_path), by_prompt) == (
        "every prompt of split train is in split test too, so that none is left to train on; "
        "without a test split, data.test_fraction of the rows is held out"
    )


def test_a_row_that_an_environment_cannot_take_is_named_by_its_line_or_skipped(tmp_path: Path) -> None:
    def even(row: Mapping[str, Any]) -> Mapping[str, Any]:
        if row["answer"] % 2:
            raise ValueError(f"has the odd answer {row['answer']}")
        return {"half": row["answer"] // 2}

    path = write(tmp_path / "data.jsonl", rows(10))
    assert message(path, RowSettings(read=even)) == (
        f"{path} line 2 has the odd answer 1; data.bad_rows=skip leaves such rows out"
    )
    found = load_rows(path, RowSettings(read=even, bad_rows="skip"))
    assert found.num_skipped == 5
    assert sorted(row["half"] for of_split in found.splits.values() for row in of_split) == [0, 1, 2, 3, 4]


BROKEN_LINES = [
    (b'{"prompt": "a"', "is not JSON (expecting ',' delimiter at character 15)"),
    (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "is not JSON (Exceeds the limit (4300 digits)"),
    (b"[", "begins a list, where each line is a row: a file of one list ends in .json"),
    (b'["prompt"]', "is not an object with columns but list"),
    (b'{"prompt": "\xff"}', "is not UTF-8 (byte 12)"),
    (b'{"question": "a"}', "has no column 'prompt' (has: question)"),
    (b'{"prompt": null}', "column 'prompt' is null; data.bad_rows=skip"),
    (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', "has 10.0 MB, more than 4.2 MB"),
    (b"[" * 100_000, "is not JSON (it is nested too deep)"),
]


@pytest.mark.parametrize(("line", "problem"), BROKEN_LINES, ids=range(len(BROKEN_LINES)))
def test_a_broken_line_is_named_or_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes, problem: str
) -> None:
    path = tmp_path / "data.jsonl"
    good = [json.dumps(row).encode() for row in rows(4)]
    path.write_bytes(b"\n".join([*good[:2], b"", line, *good[2:]]))
    assert f"{path} line 4 {problem}" in message(str(path), NEEDS_PROMPT)
    with caplog.at_level(logging.WARNING):
        found = load_rows(str(path), RowSettings(columns=("prompt",), bad_rows="skip", test_fraction=0.25))
    assert found.num_skipped == 1
    assert (len(found.splits["train"]), len(found.splits["test"])) == (3, 1)
    assert "1 broken rows skipped" in caplog.text


@pytest.mark.parametrize(
    ("lines", "setting", "end"),
    [
        (
            ['{"question": "a"}'] * 3,
            "data.prompt_column",
            ", nor has any other row; data.prompt_column=question takes another column",
        ),
        (['{"question": "a"}'] * 3, None, ", nor has any other row"),
        (['{"question": "a"}', '{"prompt": "b"}'], "data.prompt_column", "; data.bad_rows=skip leaves such rows out"),
    ],
)
def test_a_missing_column_is_refused_with_a_hint_or_its_rows_skipped(
    lines: list[str], setting: str | None, end: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    settings = RowSettings(columns=("prompt",), column_setting=setting)
    assert message(str(path), settings) == f"{path} line 1 has no column 'prompt' (has: question){end}"


def test_missing_and_empty_data_say_so(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "data.xml").write_text("prompt\n")
    (tmp_path / "bad.parquet").write_text("PAR")
    (tmp_path / "bad.arrow").write_text("ARR")
    (tmp_path / "folder").mkdir()
    assert message(None).startswith("no data: set data.path")
    assert message(str(tmp_path / "none.jsonl")) == f"no file or directory {tmp_path}/none.jsonl"
    for path in ("rows.csv", "someone/rows.jsonl.gz", "rows/", "someone/rows/", "./rows"):
        assert message(path) == f"no file or directory {path}"
    assert message(str(tmp_path / "empty.jsonl")) == f"{tmp_path}/empty.jsonl is empty"
    assert (
        message(str(tmp_path / "blank.jsonl"))
        == f"{tmp_path}/blank.jsonl has no usable rows for split train (0 broken)"
    )
    assert message(str(tmp_path / "data.xml")) == (
        f"{tmp_path}/data.xml must end in .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow "
        "(text also with .gz, .bz2, .xz, .zst)"
    )
    assert message(str(tmp_path / "bad.parquet")).startswith(f"{tmp_path}/bad.parquet is not a Parquet file")
    assert message(str(tmp_path / "bad.arrow")).startswith(f"{tmp_path}/bad.arrow is not an Arrow file")
    assert message(str(tmp_path / "folder")) == (
        f"{tmp_path}/folder holds no files that end in .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow"
    )
    assert message(str(tmp_path / "*.csv")) == f"no file matches {tmp_path}/*.csv"


@pytest.mark.parametrize("place", [".", "..", "../data", "inside/.."])
def test_a_folder_may_be_named_from_where_one_is(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "inside").mkdir(parents=True)
    write(tmp_path / "data" / "sums.jsonl", rows(4))
    monkeypatch.chdir(tmp_path / "data" / ("inside" if place == ".." else ""))
    assert len(load_rows(place, RowSettings(test_fraction=0.25)).splits["train"]) == 3


def test_two_files_for_one_split_are_ambiguous(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows(2))
    write(tmp_path / "train.json", rows(2))
    assert message(str(tmp_path)) == f"{tmp_path} has several files for split train: train.jsonl, train.json"


def test_one_row_cannot_be_divided(tmp_path: Path) -> None:
    assert message(write(tmp_path / "data.jsonl", rows(1))) == (
        "cannot hold out test rows of 1 row; give a test split: data.path=FOLDER with train.* and test.* files"
    )


def test_a_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, subset: str | None) -> None:
        raise ConnectionError(f"cannot reach {name}/{subset}\nand a long traceback")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    for problem, reason in {
        "": "ConnectionError: cannot reach openai/gsm8k/main",
        "the hub (https://huggingface.co) cannot be reached": "the hub (https://huggingface.co) cannot be reached",
    }.items():
        monkeypatch.setattr("covey.system.hub.silence", lambda problem=problem: problem)
        expected = f"cannot load data set 'openai/gsm8k' from the hub: {reason}"
        assert message("openai/gsm8k", RowSettings(subset="main")) == expected


def test_hub_splits_are_taken_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows(4)), "test": datasets.Dataset.from_list(rows(2, start=4))}
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset: found)
    assert load_rows("someone/data").splits == {"train": rows(4), "test": rows(2, start=4)}
    assert message("someone/data", RowSettings(train_split="all")).startswith(
        "data set someone/data has no split 'all'"
    )


def in_memory() -> Any:
    return datasets.Dataset.from_list(rows(10))


def both_in_memory() -> Any:
    return {"train": in_memory(), "test": rows(2, start=10)}


def questions() -> Any:
    return [{"question": "?"}, {"question": "!"}]


def test_data_sets_in_memory_are_taken_as_they_are() -> None:
    here = "tests.environments.data.test_rows"
    assert len(load_rows(f"{here}:in_memory").splits["train"]) == 9
    assert load_rows(f"{here}:both_in_memory").splits == {"train": rows(10), "test": rows(2, start=10)}
    with pytest.raises(ValueError, match="questions split train row 1 has no column 'prompt'"):
        load_rows(f"{here}:questions", NEEDS_PROMPT)


@pytest.mark.shared
def test_the_gsm8k_sample_loads(shared: Path) -> None:
    found = load_rows(str(shared / "data" / "gsm8k"), RowSettings(columns=("question", "answer"))).splits
    assert (len(found["train"]), len(found["test"])) == (500, 200)


def test_a_column_whose_name_is_no_text_is_named() -> None:
    with pytest.raises(ValueError, match="row 1 has the column 0, whose name is no text"):
        load_rows({"train": [{0: "a", "prompt": "b"}, {"prompt": "c"}]})
