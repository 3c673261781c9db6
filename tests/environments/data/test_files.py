"""The formats that people have on disk: the same rows come out of all of them, and what is broken is named."""

import bz2
import csv
import gzip
import json
import logging
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy
import pyarrow
import pyarrow.parquet
import pytest

from covey.environments.data import files, tables
from covey.environments.data.rows import RowSettings, load_rows

Rows = list[dict[str, Any]]
datasets.disable_progress_bars()


def rows(count: int, start: int = 0) -> Rows:
    return [{"prompt": f'question "{i}",\nsaid ä', "answer": str(i)} for i in range(start, start + count)]


def as_lines(given: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in given)


def write_lines(path: Path, given: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_lines(given), encoding="utf-8")
    return path


def write_table(path: Path, given: Rows, **how: Any) -> Path:
    with path.open("w", encoding=how.pop("encoding", "utf-8"), newline="") as file:
        writer = csv.DictWriter(file, list(given[0]), **how)
        writer.writeheader()
        writer.writerows(given)
    return path


def write_parquet(path: Path, given: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), path)
    return path


def write_arrow(path: Path, given: Rows) -> None:
    table = pyarrow.Table.from_pylist(given)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_stream(path: Path, given: Rows) -> None:
    table = pyarrow.Table.from_pylist(given)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def write_zstandard(path: Path, given: Rows) -> None:
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(as_lines(given).encode())


def stated(path: Path, given: Rows, mark: str) -> None:
    """As Excel is told what parts cells: in a line before the header."""
    table = write_table(path, given, delimiter=mark).read_text(encoding="utf-8")
    path.write_text(f"sep={mark}\r\n{table}", encoding="utf-8")


WRITERS: dict[str, Callable[[Path, Rows], Any]] = {
    "rows.jsonl": write_lines,
    "rows.ndjson": write_lines,
    "rows.JSONL": write_lines,
    "rows.json": lambda path, given: path.write_text(json.dumps(given, indent=1)),
    "one_line.json": lambda path, given: path.write_text(json.dumps(given)),
    "lines.json": write_lines,
    "rows.csv": write_table,
    "excel.csv": lambda path, given: write_table(path, given, encoding="utf-8-sig", delimiter=";"),
    "stated.csv": lambda path, given: stated(path, given, "|"),
    "tabs.csv": lambda path, given: write_table(path, given, delimiter="\t"),
    "rows.tsv": lambda path, given: write_table(path, given, delimiter="\t"),
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "stream.arrow": write_stream,
    "rows.jsonl.gz": lambda path, given: path.write_bytes(gzip.compress(as_lines(given).encode())),
    "members.jsonl.gz": lambda path, given: path.write_bytes(
        gzip.compress(as_lines(given[:3]).encode()) + gzip.compress(as_lines(given[3:]).encode())
    ),
    "rows.json.gz": lambda path, given: path.write_bytes(gzip.compress(json.dumps(given).encode())),
    "rows.jsonl.bz2": lambda path, given: path.write_bytes(bz2.compress(as_lines(given).encode())),
    "rows.jsonl.xz": lambda path, given: path.write_bytes(lzma.compress(as_lines(given).encode())),
    "rows.jsonl.zst": write_zstandard,
}


def message(path: Path | str, settings: RowSettings | None = None) -> str:
    with pytest.raises(ValueError) as error:
        load_rows(str(path), settings)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    usual = load_rows(str(write_lines(tmp_path / "usual.jsonl", rows(20))))
    WRITERS[name](tmp_path / name, rows(20))
    assert load_rows(str(tmp_path / name)) == usual


@pytest.mark.parametrize("name", ["jsonl", "json", "csv", "parquet", "jsonl.gz"])
def test_a_folder_may_hold_a_file_of_any_format_for_each_split(name: str, tmp_path: Path) -> None:
    for split, given in (("train", rows(4)), ("test", rows(2, start=4))):
        WRITERS[f"rows.{name}"](tmp_path / f"{split}.{name}", given)
    assert load_rows(str(tmp_path)).splits == {"train": rows(4), "test": rows(2, start=4)}


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_row_of_a_columnar_file_is_named_by_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BATCH_ROWS", 2)
    WRITERS[name](tmp_path / name, [*rows(4), {"prompt": None, "answer": "4"}, *rows(1)])
    assert message(tmp_path / name, RowSettings(columns=("prompt",))).startswith(
        f"{tmp_path / name} row 5 column 'prompt' is null"
    )


# ------------------------------------------------------------------------------------------------ broken files


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.bz2", "rows.jsonl.xz", "rows.jsonl.zst"])
def test_a_compressed_file_that_was_cut_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path, rows(2000))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert message(path).startswith(f"{path} cannot be read: ")
    path.write_bytes(b"this is plain text")
    assert message(path).startswith(f"{path} cannot be read: ")


def test_a_placeholder_of_git_lfs_says_how_to_fetch_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train-00000-of-00001.parquet"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    assert message(path) == f"{path} is a placeholder of Git LFS, not the file: `git lfs pull` fetches it"


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.json"])
def test_text_of_two_bytes_a_character_is_named_for_what_it_is(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes('{"prompt": "a"}\n'.encode("utf-16"))
    assert message(path, RowSettings(bad_rows="skip")) == f"{path} is UTF-16: save it as UTF-8"


def test_a_fault_in_a_whole_file_of_json_is_named_by_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n{"prompt": "a"},\n{"prompt" "b"}\n]\n')
    assert message(path) == f"{path} line 3 is not JSON (expecting ':' delimiter at character 11)"


TABLES = [
    (b"prompt,answer\na,1\nb,2,3\nc,3\n", "line 3 has 3 cells, the header 2"),
    (b'prompt,answer\na,1\n"b"x,2\nc,3\n', "line 3 is not a line of a table"),
    (b"prompt,answer\na,1\n\xff,2\nc,3\n", "line 3 is not UTF-8"),
    (b"prompt,answer\na,1\n,2\nc,3\n", "line 3 column 'prompt' is null"),
    (b'prompt,answer\n"a\na",1\n,2\nc,3\n', "line 4 column 'prompt' is null"),
]


@pytest.mark.parametrize(("content", "problem"), TABLES, ids=range(len(TABLES)))
def test_a_broken_row_of_a_table_is_named_by_its_line_or_skipped(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    line = message(path, RowSettings(columns=("prompt",)))
    assert line.startswith(f"{path} {problem}")
    assert line.endswith("; data.bad_rows=skip leaves such rows out")
    found = load_rows(str(path), RowSettings(columns=("prompt",), bad_rows="skip"))
    assert (found.num_skipped, sum(map(len, found.splits.values()))) == (1, 2)


def test_cells_of_a_table_are_text_and_empty_ones_are_missing(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("prompt,answer,note\n007,1.10,NA\n\n1,None\n")
    (tmp_path / "test.csv").write_text(f"prompt,answer\n{'long ' * 50_000},\n")
    found = load_rows(str(tmp_path)).splits
    assert found["train"] == [
        {"prompt": "007", "answer": "1.10", "note": "NA"},
        {"prompt": "1", "answer": "None", "note": None},
    ]
    assert found["test"] == [{"prompt": "long " * 50_000, "answer": None}]


def test_the_quotes_of_many_rows_are_not_one_long_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 40)
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\n" + "".join(f'"a, {number}",c\n' for number in range(100)))
    assert sum(map(len, load_rows(str(path)).splits.values())) == 100


def test_a_table_without_a_usable_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,\xe4\na,1\n")
    assert message(path) == f"{path} line 1 is not UTF-8; save the table as UTF-8"
    path.write_text("prompt,answer,answer\na,1,2\n")
    assert message(path) == f"{path} has several columns 'answer'"
    path.write_text("prompt,answer\n")
    assert message(path) == f"{path} has no usable rows for split train (0 broken)"


# ------------------------------------------------------------------------------------------------ folders


def test_what_save_to_disk_wrote_is_read(tmp_path: Path) -> None:
    alone = datasets.Dataset.from_list(rows(10))
    alone.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": alone, "test": datasets.Dataset.from_list(rows(2, start=20))}).save_to_disk(
        str(tmp_path / "both")
    )
    assert load_rows(str(tmp_path / "one")) == load_rows(str(write_lines(tmp_path / "usual.jsonl", rows(10))))
    assert load_rows(str(tmp_path / "both")).splits == {"train": rows(10), "test": rows(2, start=20)}
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_text("nothing")
    assert message(tmp_path / "one").startswith(f"{tmp_path}/one cannot be read as what save_to_disk wrote: ")


@pytest.mark.parametrize("below", ["", "data"])
def test_shards_and_clones_of_a_hub_are_read_by_split(
    below: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    folder = tmp_path / below
    write_parquet(folder / "train-00000-of-00002.parquet", rows(2))
    write_parquet(folder / "train-00001-of-00002.parquet", rows(2, start=2))
    write_parquet(folder / "validation-00000-of-00001.parquet", rows(2, start=4))
    (tmp_path / "README.md").write_text("# Sums\n")
    (tmp_path / ".gitattributes").write_text("*.parquet filter=lfs\n")
    of_validation = RowSettings(test_split="validation")
    assert load_rows(str(tmp_path), of_validation).splits == {"train": rows(4), "test": rows(2, start=4)}
    assert sum(map(len, load_rows(str(tmp_path)).splits.values())) == 4
    write_parquet(folder / "test-00000-of-00001.parquet", rows(1, start=9))
    assert load_rows(str(tmp_path)).splits == {"train": rows(4), "test": rows(1, start=9)}
    assert caplog.messages == []


def test_folders_named_like_splits_and_files_of_any_name_are_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "split" / "train" / "a.jsonl", rows(2))
    write_lines(tmp_path / "split" / "test" / "b.jsonl", rows(2, start=2))
    write_lines(tmp_path / "flat" / "first.jsonl", rows(5))
    write_lines(tmp_path / "flat" / "second.jsonl", rows(5, start=5))
    assert load_rows(str(tmp_path / "split")).splits == {"train": rows(2), "test": rows(2, start=2)}
    assert sum(map(len, load_rows(str(tmp_path / "flat")).splits.values())) == 10


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# Sums
"""


def test_a_data_card_names_the_subsets_of_a_folder(tmp_path: Path) -> None:
    write_lines(tmp_path / "main" / "train-0.jsonl", rows(3))
    write_lines(tmp_path / "main" / "test-0.jsonl", rows(2, start=3))
    write_lines(tmp_path / "socratic" / "train-0.jsonl", rows(5, start=5))
    (tmp_path / "README.md").write_text(CARD)
    assert load_rows(str(tmp_path), RowSettings(subset="main")).splits == {"train": rows(3), "test": rows(2, start=3)}
    assert sum(map(len, load_rows(str(tmp_path), RowSettings(subset="socratic")).splits.values())) == 5
    needs = f"{tmp_path} needs data.subset=NAME with one of main, socratic, got "
    assert message(tmp_path) == f"{needs}none"
    assert message(tmp_path, RowSettings(subset="other")) == f"{needs}other"
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    assert message(tmp_path).startswith(f"{tmp_path} is no data set: ")


def test_a_folder_without_a_card_has_no_subsets(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", rows(3))
    assert message(tmp_path, RowSettings(subset="main")) == (
        f"{tmp_path} needs data.subset=NAME with one of default, got main"
    )


def test_a_pattern_takes_all_files_that_match(tmp_path: Path) -> None:
    write_parquet(tmp_path / "shards" / "part-0.parquet", rows(6))
    write_parquet(tmp_path / "shards" / "part-1.parquet", rows(4, start=6))
    pattern = str(tmp_path / "shards" / "*.parquet")
    assert load_rows(pattern) == load_rows(str(write_lines(tmp_path / "usual.jsonl", rows(10))))
    assert load_rows(str(tmp_path / "**" / "part-[01].parquet")) == load_rows(pattern)
    write_parquet(tmp_path / "shards" / "test-0.parquet", rows(2, start=20))
    assert load_rows(pattern).splits == {"train": rows(10), "test": rows(2, start=20)}
    assert sum(map(len, load_rows(str(tmp_path / "shards" / "test*.parquet")).splits.values())) == 2


def test_rows_of_shards_are_named_by_their_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", rows(2))
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n{"prompt"\n')
    assert message(tmp_path).startswith(f"{tmp_path}/b.jsonl line 2 is not JSON (")


# ------------------------------------------------------------------------------------------------ tables, and swelling


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": ["a", "b"], "answer": ["1", "2"]},
        {"prompt": ["a", "b", "c"]},
        {"prompt": {"0": "a", "1": "b"}, "answer": {"0": "1", "1": "2"}},
        {"0": {"prompt": "a"}, "1": {"prompt": "b"}},
        {"data": [{"prompt": "a"}, {"prompt": "b"}]},
    ],
    ids=["columns", "one column", "pandas", "pandas by rows", "rows in a column"],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_table_of_columns_is_called_one(content: dict[str, Any], indent: int | None, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(content, indent=indent))
    said = message(tmp_path / "rows.json", RowSettings(columns=("prompt",)))
    assert f"is a table of columns ({', '.join(content)}); give a list of rows" in said


def test_rows_of_lists_are_rows(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "6 * 7?"}]
    given = [{"messages": said, "answers": ["42"]}, {"messages": said, "extra": {}}, {"extra": {}}, {"none": []}]
    assert [entry.row for entry in files.read_file(write_lines(tmp_path / "rows.jsonl", given))] == given


BIG = files.MAX_ROW_BYTES + 10


def swollen(path: Path, kind: str) -> Path:
    """A small file of rows that are too long, but for the last."""
    if kind == "line":
        with gzip.open(path / "rows.jsonl.gz", "wb") as file:
            file.write(b'{"prompt": "' + b"a" * (2 * BIG) + b'"}\n{"prompt": "b"}\n')
        return path / "rows.jsonl.gz"
    texts = pyarrow.array(["x" * BIG, "b"])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 99 + [1], pyarrow.int32()), texts)
    if kind == "nested":
        ends = pyarrow.array([*range(0, 99), 99, 100], pyarrow.int32())
        lists = pyarrow.ListArray.from_arrays(ends, column)
        pyarrow.parquet.write_table(pyarrow.table({"prompt": lists, "n": range(100)}), path / "rows.parquet")
        return path / "rows.parquet"
    if kind.startswith("arrow"):
        batch = pyarrow.record_batch([column], ["prompt"])
        with pyarrow.OSFile(str(path / "rows.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, batch.schema) as out:
            out.write_batch(batch)
        return path / "rows.arrow"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), path / "rows.parquet")
    return path / "rows.parquet"


@pytest.mark.parametrize(("kind", "skipped"), [("line", 1), ("parquet", 99), ("nested", 99), ("arrow", 99)])
def test_rows_that_swell_are_too_long_and_never_held(
    kind: str, skipped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BATCH_BYTES", 2 * BIG)
    monkeypatch.setattr(tables, "MAX_HELD_BYTES", BIG)
    path = swollen(tmp_path, kind)
    found = list(files.read_file(path))
    size = 8.4 if kind == "line" else 4.2
    assert [entry.problem for entry in found[:-1]] == [f"has {size} MB, more than 4.2 MB"] * skipped
    assert found[-1].row == {"prompt": ["b"], "n": 99} if kind == "nested" else {"prompt": "b"}


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pyarrow.ListArray.from_arrays([0] * 2000 + [1_000_000], numpy.zeros(1_000_000, "int8")), "at once, of"),
        (pyarrow.ListArray.from_arrays([0, 1_000_000], numpy.zeros(1_000_000, "int8")), "8.0 MB, more than 4.2 MB, on"),
        (pyarrow.array([b"q" * BIG], pyarrow.binary(BIG)), "4.2 MB, more than 4.2 MB, on average"),
    ],
    ids=["one list among many", "a list", "bytes of one length"],
)
def test_a_table_of_numbers_that_swells_is_refused(
    column: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_HELD_BYTES", BIG)
    pyarrow.parquet.write_table(pyarrow.table({"x": column, "prompt": ["a"] * len(column)}), tmp_path / "rows.parquet")
    assert said in message(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(["", "y" * BIG, "a", ""]), 2),
        pyarrow.array([b"q" * BIG, b"q" * BIG], pyarrow.binary(BIG)),
        pyarrow.array(["y" * BIG, ""]).cast(pyarrow.string_view()),
        pyarrow.RunEndEncodedArray.from_arrays([2], ["y" * BIG]),
    ],
    ids=["lists of one length", "bytes of one length", "views", "runs"],
)
def test_every_kind_of_column_is_counted(column: Any) -> None:
    sizes = tables.row_bytes(column)
    assert sizes.shape == (2,)
    assert sizes[0] >= BIG
    assert tables.row_bytes(pyarrow.array([[1, 2, 3]], pyarrow.list_(pyarrow.int8(), 3))).tolist() == [24]


def test_texts_of_a_table_that_repeat_are_read_as_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"none": None, "l": [["a", None], []], "s": {"x": "y", "n": 1}}
    given = [{"prompt": [{"role": "user", "content": f"{i % 3}?"}], **lists} for i in range(50)]
    write_parquet(tmp_path / "rows.parquet", given)
    plain = [entry.row for entry in files.read_file(tmp_path / "rows.parquet")]
    monkeypatch.setattr(tables, "MAX_HELD_BYTES", 0)
    assert [entry.row for entry in files.read_file(tmp_path / "rows.parquet")] == plain == given


def test_a_compressed_list_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_HELD_BYTES", 1000)
    with gzip.open(tmp_path / "rows.json.gz", "wb") as file:
        file.write(b"[" + b" " * 1000)
    assert "must be a list of at most" in message(tmp_path / "rows.json.gz")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a" * BIG, "line 1 must be a header, got one of more than 4.2 MB"),
        (b'prompt,answer\n"' + b'a\n","' * BIG, "must close its quotes"),
        (b"prompt,answer\n" + b"a," * BIG, "line 2 has 2097153 cells, the header 2"),
    ],
    ids=["header", "quotes", "cells"],
)
def test_a_table_of_text_that_swells_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.csv.gz", "wb") as file:
        file.write(content)
    assert said in message(tmp_path / "rows.csv.gz")


def test_a_file_of_another_format_is_named_and_a_pattern_reads_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n{"prompt": "3+3="}\n')
    assert num_rows(str(tmp_path)) == 3
    assert caplog.messages == []
    (tmp_path / "b.csv").write_text("prompt\n4+4=\n")
    assert num_rows(str(tmp_path)) == 3
    assert caplog.messages == [
        f"{tmp_path}: b.csv not read, as files of a folder have one format; data.path='{tmp_path}/*' reads all"
    ]
    assert num_rows(f"{tmp_path}/*") == 4


def num_rows(path: str) -> int:
    return sum(map(len, load_rows(path, RowSettings(test_fraction=0.34)).splits.values()))
