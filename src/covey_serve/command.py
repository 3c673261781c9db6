"""`covey serve NAME=FOLDER ...`."""

import asyncio
import fcntl
import logging
import os
import resource
import secrets
import signal
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from covey.cli.flags import split_flags
from covey.policy.settings import ModelConfig
from covey.system.text.console import CleanConsole
from covey.system.text.masking import CleanRecords
from covey_serve.model.models import Bases
from covey_serve.service import Service
from covey_serve.web.routes import answer
from covey_serve.web.server import HttpServer

WITH_VALUE = dict.fromkeys(("--to", "--port", "--host", "--precision", "--device"), "a value")
PORT, FOLDER, HOST = "8765", "outputs/serve", "127.0.0.1"
KEY = "TINKER_API_KEY"
FILES = 8192
"""Descriptors to ask the system for: each waiting client holds a connection."""


def run_serve(words: Sequence[str]) -> None:
    """Serve models until a signal comes. ValueError for wrong words."""
    others, flags = split_flags(words, WITH_VALUE, ("--full",))
    if unknown := [word for word in others if word.startswith("-")]:
        raise ValueError(f'no flag "{unknown[0]}"; flags: {", ".join((*WITH_VALUE, "--full"))}')
    if not others:
        raise ValueError("covey serve needs models, such as covey serve Qwen/Qwen3-8B=FOLDER or a hub name")
    port = flags.get("--port", PORT)
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--port must be a number in [0, 65535], got {port}")
    common: dict[str, Any] = {name: flags[f"--{name}"] for name in ("precision", "device") if f"--{name}" in flags}
    pairs = [word.partition("=") for word in others]
    folders = {name: ModelConfig(name=folder or name, **common) for name, _, folder in pairs}
    root = Path(flags.get("--to", FOLDER))
    held = _claim(root)
    _log_to(root / "covey.log")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(limit[0], FILES), limit[1]), limit[1]))
    try:
        disable_progress_bar()
        bases = Bases(folders, full="--full" in flags)
        asyncio.run(_serve(root, bases, flags.get("--host", HOST), int(port)))
    finally:
        os.close(held)


async def _serve(root: Path, bases: Bases, host: str, port: int) -> None:
    key = _key(root)
    service = Service(root, bases, key)
    server = HttpServer(partial(answer, service), service.check_head, service.limits)
    try:
        address = await server.start(host, port)
    except OSError as error:
        raise ValueError(f"--port {port} of {host} cannot be listened on ({error.strerror}); name another") from error
    say = CleanConsole().print
    say(f"covey serve: {', '.join(bases.folders)} at http://{address[0]}:{address[1]}, state in {root}", soft_wrap=True)
    say(f"export TINKER_BASE_URL=http://{address[0]}:{address[1]} {KEY}={key} TINKER_TELEMETRY=0", soft_wrap=True)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    parts: Sequence[Coroutine[Any, Any, Any]] = (service.work(), service.tidy(), stopped.wait())
    tasks = [asyncio.create_task(part) for part in parts]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await server.stop()
    with suppress(OSError):
        say(f"covey serve: stopping; the same command continues from {root}", soft_wrap=True)
    for task in tasks:
        task.cancel()
    service.close()
    for task in done:
        task.result()


def _claim(root: Path) -> int:
    """Lock the folder of the service. ValueError where another serves from it."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(root / "serve.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ValueError(f"{root} is served from by another process; name another folder with --to") from error
    return lock


def _key(root: Path) -> str:
    """Return the clients' key: the environment's, else the folder's own."""
    given = os.environ.get(KEY)
    if given:
        if not given.startswith("tml-"):
            raise ValueError(f"{KEY} must begin with tml-, which the client checks, got another")
        return given
    path = root / "key"
    if not path.is_file():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"tml-{secrets.token_hex(16)}")
    return path.read_text().strip()


def _log_to(path: Path) -> None:
    logging.raiseExceptions = False  # a full disk is no reason for a traceback
    handlers: list[logging.Handler] = [logging.FileHandler(path, delay=True), logging.StreamHandler()]
    for handler in handlers:
        handler.addFilter(CleanRecords(()))
    handlers[1].setLevel(logging.WARNING)
    logging.basicConfig(
        level=logging.INFO, handlers=handlers, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
