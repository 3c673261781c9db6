"""Fingerprints of prompts, for resumes and comparisons."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from covey.environments.base import Environment
from covey.types import Prompt


def prompt_hash(environment: Environment) -> str:
    """Return a SHA-256 over both splits' ids, texts and columns."""
    digest = hashlib.sha256()
    for split in ("train", "test"):
        digest.update(f"{split}\n".encode())
        for prompt in environment.prompts(split):
            digest.update(_content(prompt))
    return digest.hexdigest()


def run_identity(prompts: str, settings: Mapping[str, Any]) -> str:
    """Return a SHA-256 over prompts and the settings behind samples."""
    deciding = {name: _plain(value) for name, value in settings.items() if name not in BESIDE}
    return hashlib.sha256(json.dumps([prompts, deciding], sort_keys=True).encode()).hexdigest()


BESIDE = ("resume", "resume_changes", "trust_run", "output", "timeouts", "devices", "doctor")
"""Settings that change no number of a run."""


def of_prompts(prompts: Iterable[Prompt]) -> list[tuple[str, str]]:
    """Return the environment and a short SHA-256 of each prompt."""
    return [(prompt.environment, hashlib.sha256(_content(prompt)).hexdigest()[:16]) for prompt in prompts]


def _content(prompt: Prompt) -> bytes:
    known = [prompt.environment, prompt.id, _plain(prompt.text), _plain(prompt.columns)]
    return (json.dumps(known) + "\n").encode()


def _plain(value: Any) -> Any:
    """Return a process-independent form; objects count by type."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return [[str(key), _plain(item)] for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return [type(value).__name__, *(_plain(attrgetter(field.name)(value)) for field in fields(value))]
    return value.hex() if isinstance(value, bytes) else type(value).__name__
