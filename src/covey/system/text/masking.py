"""Keep secrets out of a run's files: passwords, secret settings, tokens."""

import logging
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from covey.system.text.escaping import escape

MASK = "<masked>"
"""Stands in files where a secret was. A run that has one there asks for the secret when it is resumed."""

_NAME = r"(?:(?:api|access|secret|private)_?key|secret|pass(?:word|wd|phrase)?|pwd|credentials?|auth(?:orization)?)"
_TOKEN = r"(?<!stop_)(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!end_)(?<!start_)token"
SECRET_NAME = re.compile(rf"(?i)(?:.*[_.-])?(?:{_NAME}|{_TOKEN})")
"""Names of settings whose values are secrets. Tokens of a vocabulary are none."""
IN_URL = re.compile(r"(?<=://)(?:(?P<user>[^/\s:@'\"]*):)?[^/\s'\"]*@")
IN_QUERY = re.compile(rf"(?i)(?P<name>[?&](?:[\w.-]*[_.-])?(?:{_NAME}|token|sig|signature)=)[^&\s'\"]+")
KNOWN = re.compile(
    r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"
)
"""Tokens of Hugging Face, OpenAI, GitHub, AWS and Slack, and JSON web tokens."""


def mask_text(text: str) -> str:
    """Mask passwords in URLs and tokens of a well-known form.

    >>> mask_text("no answer from http://me:pw@host/run?api_key=abc")
    'no answer from http://me:<masked>@host/run?api_key=<masked>'
    """
    text = IN_URL.sub(lambda found: f"{found['user']}:{MASK}@" if found["user"] else f"{MASK}@", text)
    return KNOWN.sub(MASK, IN_QUERY.sub(lambda found: f"{found['name']}{MASK}", text))


def mask(value: Any, name: str = "") -> Any:
    """Mask the secrets of a setting, or of a container of them.

    >>> mask({"url": "http://:pw@host", "options": {"api_key": "abc", "stop_token": "<eos>"}})
    {'url': 'http://<masked>@host', 'options': {'api_key': '<masked>', 'stop_token': '<eos>'}}
    """
    if isinstance(value, Mapping):
        inner = name if is_secret_name(name) else ""
        return {key: mask(item, inner or str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return MASK if is_secret_name(name) else mask_text(value)


def is_secret_name(name: str) -> bool:
    """Return True if a setting of this name holds a secret.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "max_tokens", "answer_key", "environment.options.db_password")]
    [True, False, False, True]
    """
    return SECRET_NAME.fullmatch(name) is not None


def secrets_in(value: Any, name: str = "") -> Iterator[str]:
    """Yield the secret texts in settings, to be masked elsewhere too."""
    if isinstance(value, Mapping):
        inner = name if is_secret_name(name) else ""
        for key, item in value.items():
            yield from secrets_in(item, inner or str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_in(item, name)
    elif isinstance(value, str) and value:
        if is_secret_name(name):
            yield value
        yield from (found[0].rpartition(":")[2].removesuffix("@") for found in IN_URL.finditer(value))


def without(text: str, secrets: tuple[str, ...]) -> str:
    """Mask these secrets and those that `mask_text` finds; very short ones stay."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= 4:
            text = text.replace(secret, MASK)
    return mask_text(text)


INDENT = "\n    "
"""Begins every line of a record but its first, so that none looks like a record of its own."""


def clean(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Escape control and invisible characters but line breaks, and mask secrets."""
    return escape(without(text, secrets), keep="\n")


class CleanRecords(logging.Filter):
    """Cleans records before a handler formats them."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        record.name, record.msg, record.args = escape(record.name), self._indent(_message(record)), None
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = self._indent("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return True

    def _indent(self, text: str) -> str:
        return clean(text, self._secrets).replace(INDENT, "\n").replace("\n", INDENT)


@contextmanager
def clean_handlers(secrets: Iterable[str] = ()) -> Iterator[None]:
    """Clean the records of the calling program's handlers inside."""
    found = [*logging.getLogger().handlers, *logging.getLogger("covey").handlers]
    handlers = [*found, *([] if logging.lastResort is None else [logging.lastResort])]
    cleaner = CleanRecords(tuple(secrets))
    for handler in handlers:
        handler.addFilter(cleaner)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(cleaner)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a format that does not fit its arguments is no reason to lose them
        return f"{record.msg} {record.args}"
