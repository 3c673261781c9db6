"""Findings of an audit as lines for a terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from covey.system.text.format import percent

WITNESSES = 8
WIDTH = 70


def print_audit(told: dict[str, Any], console: Console) -> None:
    """Print audit.json: kinds of case, examples, consistency."""
    rows = told["kinds"]
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("answer", "must be", "cases", "wrong", "95 %", "mean reward"):
        shown.add_column(heading, justify="left" if heading in ("answer", "must be") else "right")
    for row in rows:
        wrong = f"{row['wrong']}" if row["wrong"] else "-"
        share = f"{percent(row['low'])} to {percent(row['high'])}"
        due = "paid" if row["must_be_paid"] else "unpaid"
        shown.add_row(row["what"], due, str(row["cases"]), wrong, share, f"{row['mean_reward']:.2f}")
    if rows:
        console.print(shown)
        console.print("(mean reward: 0 is what an empty answer earns, 1 what the right answer does)")
    for line in (*_witnesses(rows), *told["remarks"], *_pace(told)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    closing = f"audit: {_wrong(rows, False)} false accepts, {_wrong(rows, True)} false refusals in {told['rows']} rows"
    console.print(closing, highlight=False)


def _wrong(rows: list[dict[str, Any]], must_be_paid: bool) -> str:
    """Count wrong verdicts; say so where no case could tell."""
    tried = [row for row in rows if row["must_be_paid"] is must_be_paid and row["cases"]]
    return str(sum(row["wrong"] for row in tried)) if tried else "no cases for"


def _witnesses(rows: list[dict[str, Any]]) -> list[str]:
    """Quote one case of each kind that was judged wrongly."""
    lines = []
    for row in rows:
        if row["witness"] is not None:
            said = repr(row["witness"]["text"])
            verdict = "not paid" if row["must_be_paid"] else "paid"
            lines.append(f"  {verdict}: {said[:WIDTH]} ({row['kind']}, prompt {row['witness']['prompt']})")
    return lines[:WITNESSES]


def _pace(told: dict[str, Any]) -> list[str]:
    if told["seconds"]["median"] is None:
        return []
    middle, last = (1e3 * told["seconds"][name] for name in ("median", "p99"))
    slow, kind = told["slowest"]["seconds"], told["slowest"]["kind"]
    return [f"a verdict takes {middle:.1f} ms (median), {last:.1f} ms (p99), {slow:.2f} s at most ({kind})"]
