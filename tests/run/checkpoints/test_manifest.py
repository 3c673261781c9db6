"""A manifest that is not the one that was written is found, whatever it holds, and never hangs or stops a run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.run.checkpoints.checkpoint import complete_checkpoints, newest_valid, problem, prune_checkpoints
from covey.run.checkpoints.manifest import (
    MANIFEST,
    MAX_BYTES,
    Digests,
    file_digests,
    read_manifest,
    render,
    seal_text,
    step_of,
)

FACTS: dict[str, Any] = {"versions": {"torch": "2.13.0"}, "num_ranks": 2, "prompts": "ab" * 32, "score": 0.625}


def checkpoint(checkpoints: Path, step: int, facts: dict[str, Any] = FACTS) -> Path:
    """A checkpoint as far as its manifest goes."""
    folder = checkpoints / f"step-{step:06d}"
    folder.mkdir()
    (folder / "state.pt").write_bytes(b"state of step %d" % step)
    (folder / MANIFEST).write_text(render(step, facts, file_digests(folder)))
    return folder


def sealed_again(folder: Path, **fields: Any) -> None:
    """Put other values into a manifest and seal it around them, as only somebody who means it would."""
    old = json.loads((folder / MANIFEST).read_text())
    fields = {k: v for k, v in {**old, **fields}.items() if k not in ("format", "sha256")}
    (folder / MANIFEST).write_text(render(fields.pop("step"), fields, fields.pop("files")))


def test_every_single_bit_that_flips_in_a_manifest_is_found(tmp_path: Path) -> None:
    file = (
        checkpoint(tmp_path, 2, {**FACTS, "environment": {"tier": "é\u2028", "rates": [1e-05, None, True]}}) / MANIFEST
    )
    whole = file.read_bytes()
    assert problem(file.parent) is None
    missed = []
    with file.open("r+b", buffering=0) as manifest:
        for bit in range(8 * len(whole)):
            place, changed = bit // 8, whole[bit // 8] ^ 1 << bit % 8
            os.pwrite(manifest.fileno(), bytes([changed]), place)
            if problem(file.parent) is None:
                missed.append(bit)
            os.pwrite(manifest.fileno(), whole[place : place + 1], place)
    assert missed == []
    assert len(whole) > 400


def in_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def behind_a_link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def huge(file: Path) -> None:
    os.truncate(file, MAX_BYTES + 1)


def in_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


WRITTEN: dict[str, bytes] = {
    "a list": b"[]",
    "null": b"null",
    "a number": b"1e999",
    "text": b'"x"',
    "no fields": b"{}",
    "deep": b"[" * 100_000,
    "deep fields": b'{"a":' * 100_000,
    "endless digits": b'{"format": ' + b"9" * 5000 + b"}",
    "not UTF-8": b"\xff\xfe",
    "nothing": b"",
    "format 1": b'{"format": 1, "step": 2, "files": {}}',
}
SPOILED: dict[str, Callable[[Path], object]] = {
    **{name: lambda file, text=text: file.write_bytes(text) for name, text in WRITTEN.items()},
    **{f.__name__: f for f in (in_a_pipe, behind_a_link, to_nothing, huge, in_a_folder)},
}
OTHER_TYPES: dict[str, dict[str, Any]] = {
    "files is a list": {"files": []},
    "files is text": {"files": "x"},
    "files is null": {"files": None},
    "files hold a number": {"files": {"state.pt": 3}},
    "files hold too little": {"files": {"state.pt": {"bytes": 15}}},
    "files hold null": {"files": {"state.pt": {"bytes": None, "sha256": None}}},
    "step is a path": {"step": "../../x"},
    "step is of another folder": {"step": 3},
    "step is a truth": {"step": True},
    "step is a fraction": {"step": 2.5},
    "score is text": {"score": "x"},
    "versions is a list": {"versions": [1]},
    "num_ranks is text": {"num_ranks": "two"},
    "prompts is a number": {"prompts": 5},
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", [*SPOILED, *OTHER_TYPES])
def test_a_malformed_manifest_is_an_invalid_checkpoint_and_the_one_before_is_taken(how: str, tmp_path: Path) -> None:
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    if how in SPOILED:
        SPOILED[how](newer / MANIFEST)
    else:
        sealed_again(newer, **OTHER_TYPES[how])
    fault = problem(newer)
    assert fault is not None
    assert "\n" not in fault
    assert len(fault) < 300
    assert newest_valid(tmp_path) == older
    prune_checkpoints(tmp_path, keep_last=1, keep_best=True)
    assert complete_checkpoints(tmp_path)[0] == older, "nothing is deleted unless the newest verifies"


def test_a_malformed_manifest_among_good_ones_keeps_nothing_from_being_deleted(tmp_path: Path) -> None:
    spoiled = checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)
    best, last = checkpoint(tmp_path, 3, {"score": 0.9}), checkpoint(tmp_path, 4)
    sealed_again(spoiled, score="x")
    prune_checkpoints(tmp_path, keep_last=1, keep_best=True)
    assert complete_checkpoints(tmp_path) == [best, last]


def test_of_equal_scores_the_newer_checkpoint_is_best_no_score_is_lowest(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, {"score": -0.5})
    best, *_, last = [checkpoint(tmp_path, 2, {"score": -0.5}), *(checkpoint(tmp_path, step, {}) for step in (3, 4))]
    prune_checkpoints(tmp_path, keep_last=1, keep_best=True)
    assert complete_checkpoints(tmp_path) == [best, last]


@pytest.mark.parametrize("make", [in_a_pipe, behind_a_link, to_nothing])
def test_a_file_that_is_a_link_or_a_pipe_is_damage(make: Callable[[Path], None], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2)
    make(folder / "state.pt")
    assert problem(folder) == "state.pt is not a regular file"


def test_a_file_that_was_blown_up_is_found_without_being_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2)
    os.truncate(folder / "state.pt", 1 << 40)
    assert problem(folder) == "state.pt is not what was written"


def test_a_changed_byte_a_missing_and_a_further_file_are_damage(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2)
    (folder / "state.pt").write_bytes(b"state of step 3")
    assert problem(folder) == "state.pt is not what was written"
    (folder / "state.pt").write_bytes(b"state of step 2")
    assert problem(folder) is None
    (folder / "more").touch()
    assert problem(folder) == "files ['more'] are missing or too many"
    (folder / "state.pt").unlink()
    assert problem(folder) == "files ['more', 'state.pt'] are missing or too many"


@pytest.mark.parametrize(("fields", "said"), [({}, "None"), ({"format": 1}, "1"), ({"format": 3}, "3")])
def test_a_whole_manifest_of_another_format_is_refused(fields: dict[str, int], said: str, tmp_path: Path) -> None:
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000002" / MANIFEST).write_text(seal_text({**fields, "step": 2, "files": {}}))
    assert problem(tmp_path / "step-000002") == f"manifest.json: format {said}, this covey reads 2"


def test_checkpoints_are_ordered_by_their_step_however_long_it_is(tmp_path: Path) -> None:
    found = [checkpoint(tmp_path, step) for step in (999_999, 1_000_000, 2)]
    for name in ("step-00003", "step-abcdef", "step-0000004", "step-000005.tmp-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    assert complete_checkpoints(tmp_path) == [found[2], found[0], found[1]]
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [2, 999_999, 1_000_000]


def test_of_several_good_checkpoints_the_newest_is_gone_on_from(tmp_path: Path) -> None:
    made = [checkpoint(tmp_path, step) for step in (2, 10, 9)]
    assert newest_valid(tmp_path) == made[1]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 7)
    content = read_manifest(folder)
    files: Digests = content.pop("files")
    assert files.keys() == {"state.pt"}
    assert {name: content[name] for name in ("step", *FACTS)} == {"step": 7, **FACTS}
