"""Trust of run folders: foreign ones import nothing.

A run that covey begins for you is sealed with a key that lies outside of it, so that a folder from elsewhere cannot
claim to be yours. The seal covers settings, their changes and links. It stays valid where the folder is moved.
"""

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from covey.policy.settings import FOLDER
from covey.system.disk import atomic_file, read_regular
from covey.system.text.escaping import escape
from covey.system.text.masking import mask_text

LOGGER = logging.getLogger(__name__)

SEAL = "run.seal"
SEALED = ("config.yaml", "changes.jsonl")
KEY_BYTES = 32
MAX_BYTES = 16 << 20
"""Maximum bytes of a file of settings; a longer one is refused."""
CODE = re.compile(r"[^\n]+?:[^\W\d][\w.]*")
"""module:function, of any module."""
HARMLESS = ("kinds",)
"""Settings whose values look like it but are keys of a table."""
ACTS = ("url", "servers", "address", "command", "python", "id", "trackers")
"""Settings that name servers of completions, weights or numbers, commands, interpreters, and a verifiers module."""
FETCHES = ("path", "reference_model", "teacher", "model", "judge")
"""Settings that name data and models, which a hub is asked for with this user's token unless they are files here."""
HUB_NAME = re.compile(r"(?!(?:nano[\w-]*|self)$)(?:[\w-]+(?:/[\w.-]+)?|\w+://.*)")
"""Name of something on a hub, or an address."""


def key_file() -> Path:
    """Return where the key of this user lies: $XDG_STATE_HOME/covey, else ~/.local/state/covey."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "covey" / "run.key"


def seal(run: Path) -> None:
    """Mark a run folder as this user's, if possible."""
    try:
        mac = _mac(run, _key(create=True))
        with atomic_file(run / SEAL) as file:
            file.write(mac + "\n")
    except (OSError, ValueError) as error:
        LOGGER.info("%s is not sealed (%s): resuming it may need trust_run=true", run, error)


def is_own(run: Path) -> bool:
    """Return True if this user made the unchanged folder."""
    try:
        found = read_regular(run / SEAL, 1000).decode().strip()
        return hmac.compare_digest(found, _mac(run, _key(create=False)))
    except (OSError, ValueError):
        return False


def check(source: Path, settings: Mapping[str, Any], typed: Collection[str], *, trusted: bool) -> None:
    """Refuse untrusted settings that import code or reach out.

    Runs that this user made, `trusted` ones and values that were `typed` on the command line pass. Raises ValueError.
    """
    run = source if source.is_dir() else source.parent
    risks = [f"{key}={value}" for key, value in named_code(settings) if value not in typed]
    risks += [risk for risk, value in find_risks(settings) if value not in typed]
    if not risks or trusted or ((run == source or source.name == SEALED[0]) and is_own(run)):
        return
    raise ValueError(
        f"{source} was not created by you here, and its settings run code or reach out: {_join(risks)}; review them, "
        "then pass trust_run=true, or type your own settings instead"
    )


def check_links(folder: Path, run: Path, *, trusted: bool) -> None:
    """Refuse links out of an untrusted folder.

    ValueError too for a pipe or a device, whoever made it: to open one is to wait.
    """
    links = []
    for path, target in _odd_entries(folder, run.resolve()):
        if target is None:
            raise ValueError(f"{path} is neither a file nor a folder; remove it")
        links.append(f"{path} -> {target}")
    if links and not trusted and not is_own(run):
        raise ValueError(
            f"{run} is not a run that you made here, and links lead out of it: {_join(links)}; "
            "trust_run=true follows them"
        )


def check_code(folder: Path, run: Path, code: str | None, *, trusted: bool) -> None:
    """Refuse to run code beside the weights of an untrusted run. ValueError."""
    if code == FOLDER and not trusted and not is_own(run):
        raise ValueError(
            f"{folder} is of a run that you did not make here, and model.code={FOLDER} runs the code in it; review it, "
            "then pass trust_run=true"
        )


def named_code(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield every module:function in settings, with the key it stands under.

    >>> list(named_code({"rewards": [{"function": "my:f"}], "algorithm": {"shaping": {"os:system": {}}}}))
    [('rewards.function', 'my:f'), ('algorithm.shaping', 'os:system')]
    """
    for under, value in texts_in(settings):
        if isinstance(value, str) and CODE.fullmatch(value) and under.rpartition(".")[2] not in HARMLESS:
            yield under, value


def texts_in(settings: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every name and value in settings, with its key."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield key, str(name)
            yield from texts_in(value, f"{key}.{name}" if key else str(name))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from texts_in(value, key)
    else:
        yield key, settings


def find_risks(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield other risks as (shown, value), such as servers and hub names.

    >>> list(find_risks({"environment": {"isolation": "unsafe_no_isolation", "url": ""}}))
    [('isolation=unsafe_no_isolation', 'unsafe_no_isolation')]
    """
    if isinstance(settings, list | tuple):
        settings = dict(enumerate(settings))
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        is_code = value == "unsafe_no_isolation" or (key == "code" and value == FOLDER)
        if is_code or (isinstance(value, str) and "${" in value):
            yield f"{key}={value}", value
        elif value and (
            key in ACTS or (key in FETCHES and HUB_NAME.fullmatch(str(value)) and not os.path.lexists(value))
        ):
            for named in value if isinstance(value, list | tuple) else [value]:
                yield f"{key}={mask_text(str(named))}", str(named)
        else:
            yield from find_risks(value)


def _join(found: Sequence[str]) -> str:
    return ", ".join([escape(text[:300]) for text in found[:3]] + [f"{len(found) - 3} more"] * (len(found) > 3))


def _odd_entries(folder: Path, run: Path) -> Iterator[tuple[Path, Path | None]]:
    walked = ((Path(parent), sorted([*folders, *files])) for parent, folders, files in os.walk(folder))
    below = (parent / name for parent, names in walked if not _is_log_of_wandb(parent, run) for name in names)
    for path in chain([folder], below):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # of a save in flight
            continue
        target = Path(os.path.realpath(path)) if stat.S_ISLNK(mode) else None
        if target is not None and not target.is_relative_to(run):
            yield path, target
        if target is None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            yield path, None


def _is_log_of_wandb(folder: Path, run: Path) -> bool:
    """Return True for W&B's own log links, which covey never opens."""
    return folder.name == "logs" and folder.resolve().parent.parent == run / "wandb"


def _mac(run: Path, key: bytes) -> str:
    texts = {name: read_regular(run / name, MAX_BYTES).hex() for name in SEALED if os.path.lexists(run / name)}
    links = [f"{path.relative_to(run)} -> {target}" for path, target in _odd_entries(run, run.resolve())]
    return hmac.new(key, json.dumps([texts, links]).encode(), hashlib.sha256).hexdigest()


def _key(*, create: bool) -> bytes:
    """Return the key. ValueError if shared, OSError if missing."""
    file = key_file()
    if create and not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_once(file, secrets.token_bytes(KEY_BYTES))
    key, facts = read_regular(file, KEY_BYTES), file.stat()
    if len(key) != KEY_BYTES or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise ValueError(f"{file} must be yours alone (chmod 600) and hold {KEY_BYTES} bytes")
    return key


def _write_once(file: Path, content: bytes) -> None:
    """Write a file unless another process has."""
    aside = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(aside, file)
    finally:
        os.close(descriptor)
        aside.unlink()
