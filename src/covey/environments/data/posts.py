"""Generated forum posts with summaries, like TL;DR, for small policies.

Rows have the columns of trl-lib/tldr, `prompt` and `completion`. Summaries vary: some say the one thing that happened,
some retell everything, and most forget the full stop, which leaves something to learn from rewards.
"""

import random
from collections.abc import Mapping

NUM_TRAIN = 2048
NUM_TEST = 256
BRIEF = 0.4
"""Share of summaries that say only what happened."""
STOPPED = 0.4
"""Share that end in a full stop."""

_OPENINGS = ("so", "today", "last week", "this morning", "on monday", "yesterday")
_ACTORS = (
    *("my boss", "my dog", "my cat", "my sister", "my brother", "my roommate", "my uncle", "my aunt"),
    *("our teacher", "our neighbour", "our landlord", "our coach", "a friend", "a stranger", "a student", "a waiter"),
)
_VERBS = (
    *("broke", "lost", "sold", "hid", "painted", "found"),
    *("dropped", "kept", "borrowed", "burned", "cleaned", "moved"),
)
_OBJECTS = (
    *("the lamp", "the keys", "my bike", "my phone", "the car", "my guitar", "the cake", "our tent", "the sofa"),
    *("my laptop", "the fence", "my shoes", "the ladder", "our map", "the piano", "my coat", "the radio", "my watch"),
)
_DETAILS = (
    *("after lunch", "in the rain", "at the party", "by accident", "without asking", "before the exam"),
    *("and laughed", "and said sorry", "for a joke", "once again", "at midnight", "and ran off"),
)


def posts() -> Mapping[str, list[dict[str, str]]]:
    """Return rows of both splits, disjoint and always the same.

    >>> posts()["train"][0]
    {'prompt': 'POST: ...\\nTL;DR:', 'completion': ' yesterday a stranger ...'}
    """
    generator = random.Random("posts")
    wanted = NUM_TRAIN + NUM_TEST
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < wanted:
        row = _row(generator)
        rows.setdefault(row["prompt"], row)
    drawn = list(rows.values())
    return {"train": drawn[NUM_TEST:], "test": drawn[:NUM_TEST]}


def _row(generator: random.Random) -> dict[str, str]:
    opening, detail = generator.choice(_OPENINGS), generator.choice(_DETAILS)
    event = " ".join(generator.choice(words) for words in (_ACTORS, _VERBS, _OBJECTS))
    story = f"{opening} {event} {detail}"
    summary = event if generator.random() < BRIEF else story
    end = "." if generator.random() < STOPPED else ""
    return {"prompt": f"POST: {story}\nTL;DR:", "completion": f" {summary}{end}"}
