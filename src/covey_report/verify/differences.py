"""The first difference between a run's records and a recomputation."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.run.folder import EVALUATIONS, METRICS, ROLLOUTS, VERDICTS
from covey_report.runs.outcome import is_number
from covey_report.verify.proof import CHECK, SIDES, saved_tensors, split, unpack

Row = Mapping[str, Any]

OF_THE_CLOCK = (
    *("time", "second", "streamed", "micro_batches", "engine/", "environment/"),
    *("trainer_waited", "samplers_waited"),
)
"""Parts of columns that describe the work and not its result."""
SMALL = 0.1
"""Metrics below it are compared with it, as rounding does not shrink with them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two computations of a step part."""

    step: int
    what: str
    kind: str
    """`data`, `tokens`, `log-probs`, `reward`, `row` or `weights`."""
    same_tokens: float | None = None
    """Share of the step's rollouts with the same tokens, where the run noted them."""
    gap: float | None = None
    """Largest difference of a metric, relative to it, where all tokens are the same."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, or of an evaluation, in each file."""

    proof: Row | None
    files: Mapping[str, Sequence[Row]]

    def rows(self, name: str) -> Sequence[Row]:
        return self.files.get(name, ())


def compare_step(step: int, then: StepRows, now: StepRows, names: Sequence[str] = ()) -> Difference | None:
    """Return the first difference in rollouts, rows, or weights of these `names`."""
    same, found = rollouts_differ(then.proof, now.proof)
    if found is None:
        found = next(rows_differ(then, now, (ROLLOUTS, METRICS, EVALUATIONS, VERDICTS)), None)
    if found is None and then.proof and now.proof:
        found = weights_differ(then.proof, now.proof, names)
    if found is None:
        return None
    gap = metrics_gap(then, now) if same in (None, 1.0) else None
    return Difference(step, found[1], found[0], same, gap)


def rollouts_differ(then: Row | None, now: Row | None) -> tuple[float | None, tuple[str, str] | None]:
    """Return the share with equal tokens, and the first difference (kind, text)."""
    if then is None or now is None or "rollouts" not in then:
        return None, None
    old, new = then.get("groups"), now.get("groups")
    if old is None or new is None:
        is_same = then["rollouts"] == now["rollouts"]
        return (
            (1.0, None) if is_same else (None, ("tokens", "some rollouts differ (the run had no room to note which)"))
        )
    if [group["prompt"] for group in old] != [group["prompt"] for group in new]:
        pairs = zip(old, new, strict=False)
        at = next((place for place, (a, b) in enumerate(pairs) if a["prompt"] != b["prompt"]), min(len(old), len(new)))
        names = [str(groups[at]["prompt"])[:80] if at < len(groups) else "none" for groups in (old, new)]
        return None, ("data", f"group {at + 1} is of prompt {names[0]}, and of prompt {names[1]} here")
    compared = [one for pair in zip(old, new, strict=True) for one in sides_differ(*pair)]
    same = sum("tokens" not in kinds for _, kinds in compared) / max(1, len(compared))
    return same, _first_of(old, new, compared)


def sides_differ(old: Row, new: Row) -> list[tuple[int, list[str]]]:
    """Return of each rollout of a group the sides that differ."""
    pairs = [split(unpack(group["checks"]), CHECK * len(SIDES)) for group in (old, new)]
    if len(pairs[0]) != len(pairs[1]):
        return [(0, ["tokens"])]
    sides = [(split(a), split(b)) for a, b in zip(*pairs, strict=True)]
    return [(n, [kind for kind, x, y in zip(SIDES, a, b, strict=True) if x != y]) for n, (a, b) in enumerate(sides)]


def _first_of(
    old: Sequence[Row], new: Sequence[Row], compared: Sequence[tuple[int, list[str]]]
) -> tuple[str, str] | None:
    for a, b in zip(old, new, strict=True):
        prompt = str(a["prompt"])[:80]
        if a.get("content") != b.get("content"):
            return "data", f"prompt {prompt} has other content"
        for number, kinds in sides_differ(a, b):
            if kinds:
                place = _token_place(a, b, number) if kinds[0] == "tokens" else ""
                other = "another reward" if kinds[0] == "reward" else f"other {kinds[0]}"
                return kinds[0], f"rollout {number + 1} of prompt {prompt} has {other}{place}"
    return None


def _token_place(old: Row, new: Row, number: int) -> str:
    """Return the place of the first other token, if known."""
    if "ids" not in old or "ids" not in new:
        return ""
    texts = [list(_answer(group, number)) for group in (old, new)]
    at = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    return f", from token {at + 1} of {len(texts[0])} on"


def _answer(group: Row, number: int) -> bytes:
    lengths = [int(length) for length in group["lengths"]]
    start = sum(lengths[:number])
    return unpack(group["ids"])[start : start + lengths[number]]


def rows_differ(then: StepRows, now: StepRows, files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield rows with another value, as (kind, text)."""
    for name in files:
        for number, (old, new) in enumerate(zip(then.rows(name), now.rows(name), strict=False)):
            if (column := first_column(old, new)) is not None:
                prompt = str(old.get("prompt_id"))[:80]
                whose = f" of answer {number + 1}, to prompt {prompt}," if "prompt_id" in old else ""
                kind = "reward" if column in ("reward", "parts") else "row"
                yield kind, f"{name}: {column}{whose} is {_short(old[column])}, computed {_short(new[column])}"
        if len(then.rows(name)) > len(now.rows(name)):
            yield "row", f"{name}: {len(then.rows(name))} rows, computed {len(now.rows(name))}"


def first_column(old: Row, new: Row) -> str | None:
    """Return the first common column with another value, times aside."""
    known = [name for name in old if name in new and not any(part in name for part in OF_THE_CLOCK)]
    return next((name for name in known if old[name] != new[name]), None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def weights_differ(then: Row, now: Row, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the first tensor that the update left otherwise."""
    if then.get("weights") == now.get("weights"):
        return None
    if "tensors" not in then or "tensors" not in now:
        return "weights", "the update left other weights"
    old, new = (split(unpack(one["tensors"])) for one in (then, now))
    places = [place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
    first = names[places[0]] if places and places[0] < len(names) else "unknown"
    return "weights", f"the update left other weights: tensor {first}, {len(places)} of {len(old)} in all"


def metrics_gap(then: StepRows, now: StepRows) -> float | None:
    """Return the largest relative difference of a metric."""
    gaps = [
        abs(old[name] - new[name]) / max(abs(old[name]), SMALL)
        for old, new in zip(then.rows(METRICS), now.rows(METRICS), strict=False)
        for name in old
        if is_number(old[name]) and is_number(new.get(name)) and not any(part in name for part in OF_THE_CLOCK)
    ]
    return max(gaps, default=None)


def tensors_differ(then: Path, now: Path) -> tuple[str, float] | None:
    """Name the first element in which saved policies differ, with the gap."""
    old, new = (dict(saved_tensors(folder)) for folder in (then, now))
    if old.keys() != new.keys():
        return f"tensors {sorted(old.keys() ^ new.keys())[:3]} are missing or too many", math.inf
    for name in sorted(old):
        a, b = old[name], new[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"tensor {name} is {a.dtype} of {tuple(a.shape)}, computed {b.dtype} of {tuple(b.shape)}", math.inf
        if not torch.equal(bits_of(a), bits_of(b)):
            return _element(name, a, b)
    return None


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes."""
    return tensor.flatten().contiguous().view(torch.uint8)


def _element(name: str, a: Tensor, b: Tensor) -> tuple[str, float]:
    other_N = (bits_of(a).view(a.numel(), -1) != bits_of(b).view(a.numel(), -1)).any(dim=1)
    place = int(other_N.nonzero()[0])
    x, y = a.flatten()[place].item(), b.flatten()[place].item()
    gap = float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-30))
    number = int(other_N.sum())
    return f"tensor {name}: element {place} is {x!r}, computed {y!r}; {number} of {a.numel()} differ", gap
