"""Disks that are small, full or read-only: real ones (tmpfs), where mounting is allowed."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def can_mount() -> bool:
    with TemporaryDirectory() as folder:
        done = _mount("-t", "tmpfs", "-o", "size=4k", "tmpfs", folder)
        if done:
            _run("umount", folder)
    return done


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[Callable[[], None]]:
    """A disk of its own at `place`; what it gives makes room there."""
    place.mkdir(parents=True, exist_ok=True)
    assert _mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place))
    with ExitStack() as leaving:
        leaving.callback(_run, "umount", "--lazy", str(place))
        yield lambda: _remount(place, "size=100m")


@contextmanager
def file_on_small_disk(file: Path, kilobytes: int) -> Iterator[Callable[[], None]]:
    """An empty file that lies on a disk of its own; what it gives brings it to the disk of its folder."""
    file.parent.mkdir()
    file.touch()
    with TemporaryDirectory() as beside, small_disk(Path(beside), kilobytes), ExitStack() as leaving:
        own = Path(beside) / file.name
        own.touch()
        assert _mount("--bind", str(own), str(file))
        leaving.callback(_run, "umount", "--lazy", str(file))

        def bring_back() -> None:
            leaving.close()
            shutil.copy(own, file)

        yield bring_back


def size_kilobytes(folder: Path) -> int:
    """What a folder takes on a tmpfs: whole pages of 4 KiB."""
    return sum(4 * (-(-path.stat().st_size // 4096) if path.is_file() else 1) for path in folder.rglob("*"))


def _remount(place: Path, options: str) -> None:
    assert _mount("-o", f"remount,{options}", str(place))


def _mount(*words: str) -> bool:
    return _run("mount", *words)


def _run(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False
