"""Translate device maps of transformers."""

import os
import re
from collections.abc import Mapping

from covey.policy.models.naming import ONE_DEVICE


def device_of_map(given: object) -> str:
    """Return transformers' device_map as `model.device`. ValueError where it splits a model.

    `auto` means the one device of a process, and so does the number of its rank: {"": PartialState().process_index}.

    >>> device_of_map("auto"), device_of_map({"": 1}), device_of_map("cpu"), device_of_map({"": "cuda:0"})
    ('auto', 'cuda:1', 'cpu', 'cuda:0')
    """
    places = list(given.values()) if isinstance(given, Mapping) else [given]
    found = {f"cuda:{place}" if str(place).isdigit() else str(place) for place in places}
    number = os.environ.get("LOCAL_RANK")
    if found <= {"auto", f"cuda:{number}"} and (number is not None or found == {"auto"}):
        return "auto"
    place = found.pop() if len(found) == 1 else ""
    if re.fullmatch(r"cpu|cuda(:\d+)?", place):
        return place
    raise ValueError(f"device_map={given} has no counterpart: {ONE_DEVICE}")
