"""Runs of the real command that hang where they are told to, all started at once: a hang costs no processor."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ..runs import REWARDS, Process, finish, new_run, prepare

HANGING = '''
import asyncio, os, time

NOTE = __name__ + "-hangs"

def note():
    """Says since when; False where an earlier process has hung here, so that a resumed run goes on."""
    if os.path.exists(NOTE):
        return False
    with open(NOTE, "w") as file:
        file.write(str(time.monotonic()))
    return True

def hang(*arguments, **keywords):
    if note():
        time.sleep(1000)

async def never_answer(*arguments, **keywords):
    if note():
        await asyncio.sleep(1000)

def hang_at(number, function):
    """The function, whose so-manieth call hangs."""
    calls = iter(range(1, 1 << 30))
    def called(*arguments, **keywords):
        if next(calls) == number:
            hang()
        return function(*arguments, **keywords)
    return called
'''
SETTINGS = ("preflight.enabled=false", "evaluation.num_prompts=1")


@dataclass(frozen=True)
class Hang:
    """What hangs in a run, and what the run has to say of it."""

    code: str
    """Run when the reward's module is imported, before data and model are loaded; `varied` is the reward."""
    settings: tuple[str, ...]
    waited_for: str
    seconds: float


@dataclass
class Hung:
    """A run that hangs, from its start to its end."""

    folder: Path
    name: str
    process: Process
    status: int = 0
    output: str = ""
    ended: float = 0.0

    def watch(self) -> None:
        self.status, self.output = finish(self.process)
        self.ended = time.monotonic()

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def since(self) -> float:
        """When it began to hang, on the monotonic clock, which all processes share."""
        return float((self.folder / f"hanging_{self.name}-hangs").read_text())


def start_all(folder: Path, hangs: dict[str, Hang]) -> dict[str, tuple[Hung, threading.Thread]]:
    """Each with a thread that waits for its end."""
    prepare(folder)
    started = {}
    for name, hang in hangs.items():
        (folder / f"hanging_{name}.py").write_text(HANGING + REWARDS + hang.code)
        words = (f"rewards=[hanging_{name}:varied]", *SETTINGS, *hang.settings)
        process = new_run(folder, name, *words, environment={"COVEY_TEST_RUN": mark(folder, name)})
        hung = Hung(folder, name, process)
        thread = threading.Thread(target=hung.watch)
        thread.start()
        started[name] = (hung, thread)
    return started


def mark(folder: Path, name: str) -> str:
    return f"{folder}/{name}"


def orphans(folder: Path, name: str) -> set[int]:
    """Processes of a run that are there, by what they inherited from it."""
    wanted = f"COVEY_TEST_RUN={mark(folder, name)}\0".encode()
    return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if wanted in _content(path)}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # another user's, or gone
        return b""
