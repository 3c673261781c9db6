"""What programs in other processes print, such as a reward function in a sampler, on the terminal of the run."""

import sys
from collections.abc import Mapping
from typing import Any

from covey.system.text.escaping import escape

KINDS = {"SamplerActor": "sampler", "JudgeActor": "judge", "TrainerRank": "trainer rank"}
"""Actors whose programs may print, and how they are called here."""


def show_prints(ray: Any) -> None:
    """Print what actors of this run print, in the place of all that Ray would print of them and of itself."""
    try:
        dispatcher = ray._private.ray_logging.global_worker_stdstream_dispatcher
        dispatcher.remove_handler("ray_print_logs")
        dispatcher.add_handler("covey", print_lines)
    except AttributeError:  # another Ray keeps it elsewhere, and prints them itself
        return


def print_lines(batch: Mapping[str, Any]) -> None:
    """Print the lines of one process, each with its kind and number before it."""
    name = str(batch.get("actor_name") or "")
    kind = next((own for actor, own in KINDS.items() if name.startswith((actor, own))), None)
    if kind is None:
        return
    where = sys.stderr if batch.get("is_err") else sys.stdout  # worker processes of rewards print to the former
    for line in batch.get("lines", ()):
        if not str(line).startswith(":"):  # what Ray writes there for itself
            print(escape(f"{kind} {batch.get('pid')}: {line}"), file=where, flush=True)
