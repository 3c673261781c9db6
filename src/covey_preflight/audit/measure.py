"""Measure a grader's rewards, time and consistency on cases."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from covey.algorithm.intervals import SHARE, mean_interval
from covey.environments.base import Environment, Split, text_of
from covey.environments.episode import maybe_await
from covey.types import Failure, Prompt, RunStopped
from covey_preflight.audit.cases import RIGHT, WRONG, Case, cases_of, long_cases
from covey_preflight.audit.golds import Gold, column_answer, list_forms, read_gold

CONFIDENCE = 0.95
SAME = 1e-6
"""Relative difference of rewards from which on they are two: learned judges round otherwise in another batch."""
NUM_ALONE = 3
"""Cases of a row that are judged by themselves too."""
NUM_LONG = 3
"""Rows that are answered with a megabyte."""


@dataclass(frozen=True, slots=True)
class Paid:
    """The rewards of nothing and of right answers, and paid forms."""

    nothing: float
    top: float
    forms: list[Gold]

    @classmethod
    def of(cls, forms: Sequence[Gold], nothing: float | None, rewards: Sequence[float | None]) -> "Paid | None":
        """Compare an empty answer with each form, None if none pays."""
        top = max((value for value in rewards if value is not None), default=None)
        if nothing is None or top is None or top - nothing <= SAME * max(abs(top), 1.0):
            return None
        return cls(nothing, top, [form for form, value in zip(forms, rewards, strict=True) if value == top])

    def cases(self, prompt: Prompt, others: Sequence[str]) -> list[Case]:
        """Return a prompt's cases, with other rows' right answers."""
        said = prompt.text
        asked = said if isinstance(said, str) else "\n".join(map(text_of, said))
        return cases_of(asked, self.forms[0], others, self.forms)

    def verdict(self, prompt: Prompt, case: Case, reward: float) -> "Verdict":
        """Return a case's verdict on this scale."""
        return Verdict(prompt.id, case, (reward - self.nothing) / (self.top - self.nothing))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case's reward: 0 like nothing, 1 like the right answer."""

    prompt_id: str
    case: Case
    share: float

    @property
    def is_wrong(self) -> bool:
        """Return True for an underpaid right, or overpaid wrong answer."""
        return (self.share > 0.5) != self.case.is_right


@dataclass(slots=True)
class Findings:
    """Findings of an audit."""

    verdicts: list[Verdict] = field(default_factory=list)
    num_rows: int = 0
    without_gold: int = 0
    unpaid: list[str] = field(default_factory=list)
    """Prompts whose right answer earns no more than nothing does, in any form."""
    failures: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    """Rewards that were others the second time, in another order, or alone."""
    compared: int = 0
    seconds: list[float] = field(default_factory=list)
    """Seconds to judge each completion alone."""
    slowest: tuple[float, str] = (0.0, "")

    def of_kind(self, kind: str) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.case.kind == kind]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per kind: cases, errors, interval, example."""
        found = []
        for kind, what in (*RIGHT.items(), *WRONG.items()):
            verdicts = self.of_kind(kind)
            if not verdicts:
                continue
            wrong = [verdict for verdict in verdicts if verdict.is_wrong]
            share = mean_interval(_by_prompt(verdicts), CONFIDENCE, SHARE)
            row = {"kind": kind, "what": what, "must_be_paid": kind in RIGHT, "cases": len(verdicts)}
            row |= {"wrong": len(wrong), "share": share.value, "low": share.low, "high": share.high}
            row |= {"mean_reward": fmean(verdict.share for verdict in verdicts)}
            witness = {"prompt": wrong[0].prompt_id, "text": wrong[0].case.text[:200]} if wrong else None
            found.append({**row, "witness": witness})
        return found

    def remarks(self) -> list[str]:
        """Describe problems beside single verdicts."""
        lines = []
        if self.without_gold:
            lines.append(f"{self.without_gold} of {self.num_rows} rows name no right answer: nothing was asked of them")
        if self.unpaid:
            first, num = self.unpaid[0], len(self.unpaid)
            lines.append(f"the right answer earns no more than nothing does in {num} rows, first: prompt {first}")
        lines += [f"failed {count} times, {reason}" for reason, count in self.failures.most_common(10)]
        return lines + [f"{count} of {self.compared} rewards were others {how}" for how, count in self.changes.items()]

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        ordered = sorted(self.seconds)
        last = ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else None
        return {
            "rows": self.num_rows,
            "without_gold": self.without_gold,
            "unpaid": self.unpaid,
            "kinds": self.rows(),
            "failures": dict(self.failures.most_common(10)),
            "changes": dict(self.changes),
            "compared": self.compared,
            "remarks": self.remarks(),
            "seconds": {"median": median(ordered) if ordered else None, "p99": last},
            "slowest": {"seconds": self.slowest[0], "kind": self.slowest[1]},
        }


def _by_prompt(verdicts: Sequence[Verdict]) -> list[float]:
    of_prompt: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        of_prompt[verdict.prompt_id].append(float(verdict.is_wrong))
    return [fmean(wrong) for wrong in of_prompt.values()]


async def audit(environment: Environment, split: Split, num_rows: int) -> Findings:
    """Grade all cases of a split's first rows, uncounted."""
    prompts, found = environment.prompts(split), Findings()
    golds = [(prompt, gold_forms(environment, prompt)) for prompt in prompts[: 2 * num_rows]]
    others = [forms[0].answer for _, forms in golds if forms]
    for prompt, forms in golds[:num_rows]:
        found.num_rows += 1
        if not forms:
            found.without_gold += 1
            continue
        judge, own = environment.dry_run(prompt) or (environment, prompt)
        await _Row(judge, own, found).ask(forms, others)
    return found


def gold_forms(environment: Environment, prompt: Prompt) -> list[Gold]:
    """Return the right answer's possible forms."""
    completion = environment.gold(prompt)
    if completion is not None:
        return [read_gold(completion)]
    answer = column_answer(prompt.columns)
    return [] if answer is None else list_forms(answer)


class _Row:
    """The questions about one row."""

    def __init__(self, judge: Environment, prompt: Prompt, found: Findings) -> None:
        self._judge, self._prompt, self._found = judge, prompt, found

    async def ask(self, forms: Sequence[Gold], others: Sequence[str]) -> None:
        """Find the paid form, then grade cases twice, reversed, and alone."""
        nothing, *rewards = await self._rewards([Case("empty", ""), *(Case("gold", form.text) for form in forms)])
        paid = Paid.of(forms, nothing, rewards)
        if paid is None:
            self._found.unpaid.append(self._prompt.id)
            return
        short = paid.cases(self._prompt, others)
        long = long_cases(paid.forms[0]) if self._found.num_rows <= NUM_LONG else []
        first = await self._rewards(short)
        for case, value in (*zip(short, first, strict=True), *zip(long, await self._rewards(long), strict=True)):
            if value is not None:
                self._found.verdicts.append(paid.verdict(self._prompt, case, value))
        self._compare("the second time", first, await self._rewards(short))
        self._compare("in another order", first[::-1], await self._rewards(short[::-1]))
        chosen = range(0, len(short), max(1, len(short) // NUM_ALONE))
        alone = [(await self._rewards([short[index]]))[0] for index in chosen]
        self._compare("alone", [first[index] for index in chosen], alone)

    def _compare(self, how: str, before: Sequence[float | None], after: Sequence[float | None]) -> None:
        pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
        self._found.compared += len(pairs)
        changed = sum(abs(a - b) > SAME * max(1.0, abs(a), abs(b)) for a, b in pairs)
        if changed:
            self._found.changes[how] += changed

    async def _rewards(self, cases: Sequence[Case]) -> list[float | None]:
        """Return each case's reward, one by one after a failure."""
        started = time.perf_counter()
        texts = [case.text for case in cases]
        # Without a tokenizer the bytes stand in for tokens
        tokens = [list(text.encode(errors="replace")[:4096]) for text in texts]
        try:
            judged = list(await maybe_await(self._judge.score_tokens(self._prompt, texts, tokens)))
        except RunStopped:
            raise
        except (Exception, SystemExit) as error:  # foreign code
            judged = [Failure(f"{type(error).__name__}: {error}")] * len(cases)
        seconds = time.perf_counter() - started
        kinds = {case.kind for case in cases}
        if len(cases) == 1:
            self._found.seconds.append(seconds)
        if len(kinds) == 1:
            self._found.slowest = max(self._found.slowest, (seconds / len(cases), min(kinds)))
        if any(isinstance(one, Failure) for one in judged) and len(cases) > 1:
            return [(await self._rewards([case]))[0] for case in cases]
        for case, one in zip(cases, judged, strict=True):
            if isinstance(one, Failure) and one.is_fault:
                self._found.failures[f"{case.kind}: {one.reason}"] += 1
        return [None if isinstance(one, Failure) else one.value for one in judged]
