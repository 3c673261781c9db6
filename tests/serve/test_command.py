"""What `covey serve` refuses before it serves, and the key that it gives out."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.policy.settings import ModelConfig
from covey_serve import command


class Nothing:
    """Bases that are never loaded."""

    def __init__(self, folders: dict[str, ModelConfig], *, full: bool) -> None:
        self.folders, self.full = folders, full


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve nothing: keep the key that clients would need."""
    found: list[str] = []

    async def serve(root: Path, bases: Nothing, host: str, port: int) -> None:
        found.append(command._key(root))

    monkeypatch.delenv(command.KEY, raising=False)
    monkeypatch.setattr(command, "Bases", Nothing)
    monkeypatch.setattr(command, "_serve", serve)
    handlers, level = logging.root.handlers[:], logging.root.level
    yield found
    logging.root.handlers[:], logging.root.level = handlers, level


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "covey serve needs models"),
        (["a=nano", "--folder"], 'no flag "--folder"'),
        (["a=nano", "--port", "65536"], r"--port must be a number in \[0, 65535\], got 65536"),
        (["a=nano", "--port", "-1"], "--port"),
    ],
)
def test_wrong_words_of_serve_are_refused_before_anything_is_made(
    words: list[str], message: str, tmp_path: Path, keys: list[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        command.run_serve([*words, "--to", str(tmp_path / "state")])
    assert not (tmp_path / "state").exists()


def test_a_served_folder_and_its_key_are_their_owners_alone_and_stay(tmp_path: Path, keys: list[str]) -> None:
    root = tmp_path / "state"
    for _ in range(2):
        command.run_serve(["a=nano", "--to", str(root), "--port", "65535"])
    assert keys[0] == keys[1]
    assert keys[0].startswith("tml-")
    assert len(keys[0]) == 36
    modes = {name: (root / name).stat().st_mode & 0o777 for name in (".", "key", "serve.lock")}
    assert modes == {".": 0o700, "key": 0o600, "serve.lock": 0o600}


def test_a_key_that_no_client_takes_is_refused(
    tmp_path: Path, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(command.KEY, "tml-mine")
    command.run_serve(["a=nano", "--to", str(tmp_path)])
    assert keys == ["tml-mine"]
    monkeypatch.setenv(command.KEY, "mine")
    with pytest.raises(ValueError, match="TINKER_API_KEY must begin with tml-"):
        command.run_serve(["a=nano", "--to", str(tmp_path)])
    assert not (tmp_path / "key").exists()


def test_two_services_never_share_a_folder(tmp_path: Path, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(root: Path, bases: Nothing, host: str, port: int) -> None:
        with pytest.raises(ValueError, match="is served from by another process; name another folder with --to"):
            command._claim(root)

    monkeypatch.setattr(command, "_serve", serve)
    command.run_serve(["a=nano", "--to", str(tmp_path)])
