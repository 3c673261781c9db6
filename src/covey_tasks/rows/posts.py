"""Generated forum posts with summaries, like TL;DR, for small policies.

Rows have the columns of trl-lib/tldr, `prompt` and `completion`. Summaries vary: some say the one thing that happened,
some retell everything, and most forget the full stop, which leaves something to learn from rewards.
"""

import random
from collections.abc import Mapping
from pathlib import Path

from covey.system.lookup import read_table

NUM_TRAIN = 2048
NUM_TEST = 256
BRIEF = 0.4
"""Share of summaries that only tell the events."""
STOPPED = 0.4
"""Share that end in a full stop."""

PARTS = read_table(Path(__file__).with_suffix(".yaml"))


def posts() -> Mapping[str, list[dict[str, str]]]:
    """Return rows of both splits, disjoint and always the same.

    >>> posts()["train"][0]
    {'prompt': 'POST: ...\\nTL;DR:', 'completion': ' yesterday a stranger ...'}
    """
    generator = random.Random("posts")
    wanted = NUM_TRAIN + NUM_TEST
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < wanted:
        opening, detail = generator.choice(PARTS["openings"]), generator.choice(PARTS["details"])
        event = " ".join(generator.choice(PARTS[name]) for name in ("actors", "verbs", "objects"))
        story = f"{opening} {event} {detail}"
        summary = event if generator.random() < BRIEF else story
        end = "." if generator.random() < STOPPED else ""
        row = {"prompt": f"POST: {story}\nTL;DR:", "completion": f" {summary}{end}"}
        rows.setdefault(row["prompt"], row)
    drawn = list(rows.values())
    return {"train": drawn[NUM_TEST:], "test": drawn[:NUM_TEST]}
