"""The journal: records with checksums, torn ends, compaction."""

import os
from pathlib import Path

import pytest

from covey_serve.store.journal import RequestJournal


def texts(path: Path) -> list[tuple[str, bytes]]:
    journal = RequestJournal(path)
    return [(header["kind"], journal.read(place)[1]) for place, header in journal.records()]


def filled(path: Path) -> RequestJournal:
    journal = RequestJournal(path)
    for number in range(3):
        journal.append({"kind": f"k{number}"}, b"body" * number)
    return journal


def test_records_are_read_in_order_by_another_process(tmp_path: Path) -> None:
    filled(tmp_path / "journal")
    assert texts(tmp_path / "journal") == [("k0", b""), ("k1", b"body"), ("k2", b"bodybody")]


@pytest.mark.parametrize("lost", [1, 5, 20, 40])
def test_a_torn_end_is_cut_and_written_over(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "journal"
    journal = filled(path)
    os.truncate(path, journal.size - lost)
    assert texts(path) == [("k0", b""), ("k1", b"body")]
    again = RequestJournal(path)
    list(again.records())
    again.append({"kind": "new"}, b"n")
    assert texts(path) == [("k0", b""), ("k1", b"body"), ("new", b"n")]


def test_a_flipped_bit_ends_the_journal_before_its_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    filled(path)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    assert [kind for kind, _ in texts(path)] == ["k0", "k1"]


def test_damage_before_whole_records_is_refused_and_the_file_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    filled(path)
    raw = bytearray(path.read_bytes())
    raw[30] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"damaged at byte 0, and whole records follow: .* \(truncate -s 0 "):
        texts(path)
    assert path.read_bytes() == raw


def test_compaction_keeps_bodies_under_their_new_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("covey_serve.store.journal.sync", synced.append)
    journal = filled(tmp_path / "journal")
    places = [place for place, _ in journal.records()]
    before = journal.size
    (place,) = journal.compact([({"kind": "kept"}, places[2])])
    assert journal.read(place) == ({"kind": "kept"}, b"bodybody")
    assert synced == [tmp_path]  # the new name outlives a power cut
    assert journal.size < before
    journal.append({"kind": "after"})
    assert texts(tmp_path / "journal") == [("kept", b"bodybody"), ("after", b"")]


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(tmp_path / "journal")
    real, left = os.pwrite, [10]

    def refuse(file: int, data: bytes, place: int) -> int:
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        left[0] -= 10
        return real(file, data[:10], place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, match="No space left"):
            journal.append({"kind": "lost"}, b"x" * 100)
    journal.append({"kind": "next"})
    assert [kind for kind, _ in texts(tmp_path / "journal")] == ["k0", "k1", "k2", "next"]


def test_a_compacted_journal_is_written_on_where_its_folder_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error")

    journal = filled(tmp_path / "journal")
    places = [place for place, _ in journal.records()]
    monkeypatch.setattr("covey_serve.store.journal.sync", refuse)
    (place,) = journal.compact([({"kind": "kept"}, places[2])])
    journal.append({"kind": "later"})
    assert journal.read(place)[1] == b"bodybody"
    assert texts(tmp_path / "journal") == [("kept", b"bodybody"), ("later", b"")]
