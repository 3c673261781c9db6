"""Detect a text's language by langdetect, imported lazily, with a fixed seed."""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SEED = 0
"""langdetect draws at random; on mixed and short texts its answer depends on the draws."""


def check_installed() -> None:
    """Raise ValueError if langdetect is not installed."""
    if find_spec("langdetect") is None:
        raise ValueError("checking languages needs langdetect: pip install langdetect")


@lru_cache(maxsize=1)
def codes() -> list[str]:
    """Return the languages that langdetect knows, by their codes."""
    from langdetect.detector_factory import PROFILES_DIRECTORY

    profiles = (path for path in Path(PROFILES_DIRECTORY).iterdir() if not path.name.startswith("."))
    return sorted(path.name for path in profiles if path.is_file())


@lru_cache(maxsize=4096)
def detect(text: str) -> str | None:
    """Return the likeliest language's code, None without usable letters.

    ValueError where langdetect is not installed.
    """
    check_installed()
    from langdetect import LangDetectException

    detector = _factory().create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


@lru_cache(maxsize=1)
def _factory() -> Any:
    """Build an own factory with profiles in order; other seeds stay unchanged."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    profiles = [Path(PROFILES_DIRECTORY) / code for code in codes()]
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in profiles])
    factory.set_seed(SEED)
    return factory
