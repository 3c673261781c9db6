"""Programming problems with tests, drawn from families or read from rows."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.environments.base import Split
from covey_sandbox.types import CallTest, Test
from covey_tasks.code.families import CLASSICS, FAMILIES, Arguments, Draft, chosen_families
from covey_tasks.code.words import MADE_UP, asked, shown_call, signature_of, to_define

NUM_TESTS = 10
"""Tests of a generated problem unless the settings give another number."""
MAX_DRAWS = 2000
"""Calls drawn for the tests of a problem; the least varied family needs some dozens."""
NUM_EXAMPLES = 2
"""Calls that a drawn problem shows, with different answers and none of them a test."""
CLASSIC = "classic"
"""Seed of a well-known problem. If a level has one, it is all there is to train on, and similar ones are
held out."""
MAX_MISSES = 200
"""Draws in a row that bring nothing new, after which a family is taken to have no further problems."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A programming task: its statement and its tests.

    >>> Problem("line", 1, "Python: f(n) returns n plus 7", "f", (CallTest((3,), expected=10),))
    """

    family: str
    """Family, or the source of the row."""
    difficulty: int | str | None
    statement: str
    """Text that the policy reads."""
    entry_point: str
    tests: tuple[Test, ...]
    solution: str | None = None
    """A program that passes."""
    opening: str = ""
    """Beginning of the program, where the policy is to continue it."""
    preamble: str = ""
    """Code before every program: the imports that a site makes."""
    left_out: str = ""
    """Reason why tests of the row are not run."""
    drawn_from: str | None = None
    """The seed that the problem was drawn with; it makes further tests."""

    def fresh_tests(self, seed: str) -> tuple[Test, ...]:
        """Draw tests with other inputs where the problem was drawn."""
        if self.drawn_from is None or not isinstance(self.difficulty, int):
            return self.tests
        return draft_tests(drawn(self.family, self.difficulty, self.drawn_from), seed, len(self.tests))


def with_tests(problems: Mapping[Split, Sequence[Problem]], count: int | None, seed: int) -> dict[Split, list[Problem]]:
    """Keep at most `count` tests of each problem, drawn by the seed."""
    if count is None:
        return {split: list(found) for split, found in problems.items()}
    return {split: [_judged_by(problem, count, seed) for problem in found] for split, found in problems.items()}


def _judged_by(problem: Problem, count: int, seed: int) -> Problem:
    places = range(len(problem.tests))
    drawn = random.Random(f"code tests {seed} {problem.statement}").sample(places, min(count, len(places)))
    return replace(problem, tests=tuple(problem.tests[place] for place in sorted(drawn)))


def drawn(family: str, difficulty: int, seed: str) -> Draft:
    """Draw the problem of a seed, or take the classic one."""
    if seed == CLASSIC:
        return CLASSICS[family, difficulty]
    return FAMILIES[family][difficulty](random.Random(seed))


def draft_tests(draft: Draft, seed: str, count: int = NUM_TESTS) -> tuple[CallTest, ...]:
    """Draw distinct tests, answered by the draft's program, by the seed alone.

    At most half of them, rounded up, are passed by a program that returns a constant, or what it was given.
    """
    rng = random.Random(f"{draft.statement}/{seed}")
    solve = reference(draft)
    tests: dict[str, CallTest] = {}
    passed: Counter[str] = Counter()
    most_alike = (count + 1) // 2
    for turn in range(MAX_DRAWS):
        arguments = draft.inputs[turn % len(draft.inputs)](rng)
        test = CallTest(arguments, expected=solve(*arguments))
        idle = _idle_programs(arguments, test.expected)
        if repr(arguments) in tests or any(passed[program] == most_alike for program in idle):
            continue
        tests[repr(arguments)] = test
        passed.update(idle)
        if len(tests) == count:
            return tuple(tests.values())
    raise ValueError(
        f"environment.tests_per_problem={count} is too many for {draft.statement!r:.60}, which has {len(tests)}"
    )


def _idle_programs(arguments: Arguments, expected: Any) -> list[str]:
    """Name the programs without work that give this answer."""
    first = arguments[0]
    returned = {
        "first": first,
        "last": arguments[-1],
        "text": str(first),
        "sorted": sorted(first) if isinstance(first, list) and {*map(type, first)} <= {list} else None,
    }
    answer = repr(expected)
    return [f"returns {answer}", *(name for name, value in returned.items() if repr(value) == answer)]


def reference(draft: Draft) -> Callable[..., Any]:
    """Execute the draft's own program, which is covey's text."""
    namespace: dict[str, Any] = {}
    exec(draft.solution, namespace)
    return namespace[draft.entry_point]


def generate_problems(
    problem: str,
    difficulty: int | None,
    counts: Mapping[Split, int],
    seed: int,
    num_tests: int = NUM_TESTS,
    style: str = "full",
) -> dict[Split, list[Problem]]:
    """Generate distinct problems per split, families round-robin; small families are divided.

    In style `short` a problem is a few words, for a policy that reads few characters.

    Raises ValueError for unknown families and difficulties and for counts below 1.
    """
    if min(counts.values()) < 1:
        raise ValueError(f"num_train and num_test must be >= 1, got {counts['train']} and {counts['test']}")
    chosen = chosen_families(problem, difficulty)
    splits: dict[Split, list[Problem]] = {"train": [], "test": []}
    for place, (family, level) in enumerate(chosen):
        wanted = {split: number // len(chosen) + (place < number % len(chosen)) for split, number in counts.items()}
        if (family, level) in CLASSICS:
            wanted["train"] = min(1, wanted["train"])
        drafts = _different(family, level, sum(wanted.values()), seed)
        put = _in_short if style == "short" else _in_full
        made = [
            replace(
                put(draft, draft_tests(draft, "tests", num_tests)), family=family, difficulty=level, drawn_from=source
            )
            for source, draft in drafts.items()
        ]
        num_test = -(-len(made) * wanted["test"] // max(1, sum(wanted.values())))
        splits["test"] += made[:num_test]
        splits["train"] += made[num_test:]
    for split, found in splits.items():
        random.Random(f"code order {split} {seed}").shuffle(found)
    return splits


def _different(family: str, level: int, count: int, seed: int) -> dict[str, Draft]:
    """Draw up to `count` different drafts by their seeds, a classic last."""
    classics = [CLASSIC] if (family, level) in CLASSICS else []
    drafts = {source: drawn(family, level, source) for source in classics}
    said = {draft.statement for draft in drafts.values()}
    misses = number = 0
    while len(drafts) < count and misses < MAX_MISSES:
        source = f"code {family} {level} {seed} {number}"
        draft = drawn(family, level, source)
        misses = misses + 1 if draft.statement in said else 0
        number += 1
        if not misses:
            drafts[source] = draft
            said.add(draft.statement)
    return {source: drafts[source] for source in [*list(drafts)[len(classics) :], *classics]}


def _in_short(draft: Draft, tests: tuple[CallTest, ...]) -> Problem:
    return Problem("", None, draft.statement, draft.entry_point, tests, draft.solution)


def _in_full(draft: Draft, tests: tuple[CallTest, ...]) -> Problem:
    given = {repr(test.args) for test in tests}
    others = (draft_tests(draft, f"shown {number}", NUM_EXAMPLES) for number in range(MAX_MISSES))
    shown = next((calls for calls in others if given.isdisjoint(repr(call.args) for call in calls)), ())
    task = MADE_UP.format(told=draft.statement.removeprefix("Python: ").rstrip("."))
    signature = signature_of(draft.solution, draft.entry_point, tests)
    called = to_define(draft.entry_point, signature)
    statement = asked(task, called, [shown_call(draft.entry_point, call) for call in shown])
    return replace(_in_short(draft, tests), statement=statement)
