"""Build the content of a report as plain data."""

import json
from collections.abc import Sequence
from typing import Any

from covey.run.folder import is_running
from covey.system.disk import as_written
from covey.system.text.format import duration, memory, three_digits
from covey_report.compare import comparison
from covey_report.doctor.health import doctor_page
from covey_report.logs.read import Row, RunFiles, cut, plain_mapping
from covey_report.page.curves import curves_of, number, phases_of, prompts_of, short, span_of
from covey_report.page.environments import environment_of
from covey_report.page.origins import algorithm_of, command_of, plain, settings_page
from covey_report.plan.kept import against, kept_plan
from covey_report.runs.outcome import outcome_of, sentence

FORMAT = 1
TRACE_BYTES, PAIR_BYTES, GROUP_BYTES = 1_300_000, 500_000, 300_000
"""Maximum bytes of traces, of answers before and after, and of rewards by prompt, of all runs together."""


def content(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, Any]:
    """Build the content of a page. ValueError for damaged files."""
    shares = len(runs)
    return {
        "format": FORMAT,
        "runs": [_run(run, name, shares) for run, name in zip(runs, names, strict=True)],
        "compare": comparison(runs, names) if len(runs) > 1 else None,
    }


def _run(run: RunFiles, name: str, shares: int) -> dict[str, Any]:
    with as_written(run.folder):
        return {
            "name": name,
            "title": title_of(run, name),
            "verdict": verdict(run),
            "facts": _facts(run),
            "doctor": doctor_page(run),
            "curves": curves_of(run),
            "span": span_of(run),
            "histograms": _histograms(run.updates),
            "groups": thinned(_groups(run.updates), GROUP_BYTES // shares),
            "traces": thinned([_trace(row) for row in run.traces], TRACE_BYTES // shares),
            "pairs": pairs_of(run, PAIR_BYTES // shares),
            "phases": [(phase, short(seconds), short(share)) for phase, seconds, share in phases_of(run.summary or {})],
            "planned": planned(run),
            "settings": settings_page(run),
            "versions": {key: str(value) for key, value in run.versions.items()},
            "environment": environment_of(run),
            "audit": audit_of(run.audit),
        }


def title_of(run: RunFiles, name: str) -> str:
    """Title a run by recipe or task, start and folder."""
    rows = [*run.looks[:1], *run.steps[:1]]
    began = min((str(row["time"])[:16].replace("T", " ") for row in rows if row.get("time")), default="")
    task = command_of(run.versions).recipe or str(run.settings.get("environment.name", ""))
    return ", ".join(word for word in (task, began, name) if word)


def planned(run: RunFiles) -> dict[str, Any] | None:
    """Compare a run with its plan, None without one."""
    row = kept_plan(run.settings) if run.settings and run.summary else None
    if row is None:
        return None
    rows = [(name, short(plan), short(taken)) for name, plan, taken in against(row, run.summary or {})]
    return {"rows": rows, "source": str(row.get("source", ""))}


def audit_of(found: Row) -> dict[str, Any] | None:
    """Build the page of an audit, None without one."""
    kinds = [kind for kind in found.get("kinds") or () if isinstance(kind, dict)]
    if not kinds:
        return None
    seconds = plain_mapping(found.get("seconds"))
    rows = [
        {
            **{name: short(number(kind.get(name))) for name in ("cases", "wrong", "low", "high", "mean_reward")},
            "what": cut(kind.get("what")),
            "must_be_paid": kind.get("must_be_paid") is True,
            "witness": cut(plain_mapping(kind.get("witness")).get("text")),
        }
        for kind in kinds
    ]
    remarks = [cut(line) for line in found.get("remarks") or ()]
    times = {name: short(number(seconds.get(name))) for name in ("median", "p99")}
    return {"rows": short(number(found.get("rows"))), "kinds": rows, "remarks": remarks, "seconds": times}


def verdict(run: RunFiles) -> dict[str, str]:
    """Describe the result of a run in a sentence."""
    summary, last = run.summary, run.steps[-1] if run.steps else None
    wanted = run.settings.get("num_steps")
    if summary is None:
        where = f"step {last['step']}{f' of {wanted}' if wanted else ''}" if last else "no step is finished yet"
        mean = number(last.get("sampled_reward_mean")) if last else None
        reward = "" if mean is None else f", reward {three_digits(mean)}"
        how = "Under way" if is_running(run.folder) else "Under way, or killed"
        return {"state": "running", "badge": "under way", "text": f"{how}: {where}{reward}."}
    found, how = outcome_of(summary), summary.get("status", "")
    if how == "completed":
        return {"state": found.state, "badge": found.words, "text": f"{sentence(summary)}."}
    why = f" because {run.error}" if run.error and how == "failed" else ""
    done = f"{str(how).capitalize()} after {summary.get('steps')} of {wanted} steps{why}."
    state = "failed" if how == "failed" else "interrupted"
    told = "" if found.state == "none" else f": {found.words}"
    return {"state": state, "badge": state, "text": f"{done} {sentence(summary)}{told}."}


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    settings, summary = run.settings, run.summary or {}
    sizes = f"{settings.get('groups_per_step')} × {settings.get('group_size')} answers a step"
    recipe = command_of(run.versions).recipe
    found = [
        *([("recipe", recipe)] if recipe else []),
        ("task", f"{settings.get('environment.name')}"),
        ("policy", f"{settings.get('model.name')}" + (", LoRA" if settings.get("model.lora_rank") else "")),
        ("algorithm", algorithm_of(run)),
        ("steps", f"{len(run.steps)} of {settings.get('num_steps')}, {sizes}"),
        ("seed", str(settings.get("seed"))),
    ]
    if summary:
        found.append(("time", duration(summary.get("seconds", 0))))
        found.append(("tokens", f"{summary.get('tokens', 0):,}, {summary.get('tokens_per_second', 0):,.0f} a second"))
        found.append(("memory", f"{memory(summary.get('peak_memory_bytes', 0))} at peak"))
    return found


def _histograms(updates: Sequence[Row]) -> dict[str, Any]:
    """Choose at most 80 steps of each histogram, evenly spread."""
    names = ("reward", "advantage", "length", "entropy", "log_ratio", "mismatch")
    chosen = [updates[index * len(updates) // min(80, len(updates))] for index in range(min(80, len(updates)))]
    chosen = [*chosen[:-1], updates[-1]] if chosen else []
    return {
        name: [{"step": row["step"], **found} for row in chosen if (found := (row.get("histograms") or {}).get(name))]
        for name in names
    }


def _groups(updates: Sequence[Row]) -> list[Row]:
    return [
        {"step": row["step"], "num": row.get("num_groups"), "groups": [(g["prompt_id"], g["rewards"]) for g in groups]}
        for row in updates
        if (groups := row.get("groups"))
    ]


def _trace(row: Row) -> Row:
    return {
        "step": row["step"],
        "reason": row.get("reason"),
        "id": row.get("prompt_id"),
        "prompt": cut(row.get("prompt")),
        "columns": {name: cut(plain(value), 600) for name, value in (row.get("columns") or {}).items()},
        "dropped": row.get("dropped"),
        "failures": row.get("failures") or [],
        "rollouts": [_rollout(one) for one in row.get("rollouts") or []],
    }


def _rollout(one: Row) -> Row:
    tokens = one.get("tokens") or {}
    # Values of each token, null where the policy did not choose it
    numbers = {
        name: [short(value) if isinstance(value, int | float) else None for value in tokens[name]]
        for name in ("sampler_logprob", "trainer_logprob", "ratio", "entropy", "kl")
        if tokens.get(name)
    }
    # Ratios of 1 everywhere say nothing
    if set(numbers.get("ratio", [])) <= {1.0, None}:
        numbers.pop("ratio", None)
    return {
        "text": cut(one.get("completion")),
        "reward": one.get("reward"),
        "parts": one.get("parts") or {},
        "extra": {name: cut(plain(value), 600) for name, value in (one.get("extra") or {}).items()},
        "advantage": one.get("advantage"),
        "finish": one.get("finish_reason"),
        "stop": one.get("stop_reason"),
        "turns": [_turn(turn) for turn in one.get("turns") or [] if isinstance(turn, dict)],
        "num": one.get("num_tokens"),
        "pieces": tokens.get("pieces") or [],
        "ids": tokens.get("ids") or [],
        "learnt": "".join("1" if flag else "0" for flag in tokens.get("learnt") or []),
        **numbers,
    }


def _turn(turn: Row) -> Row:
    own = {"num": turn.get("num_tokens"), "reward": turn.get("reward"), "void": bool(turn.get("is_void"))}
    return own | {"state": cut(turn.get("state"), 200), "info": cut(plain(turn["info"]), 300) if "info" in turn else ""}


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """Drop rows evenly by step until the rest fits the bytes."""
    kept, sizes = list(rows), {id(row): len(json.dumps(row, default=str)) for row in rows}
    while kept and (size := sum(sizes[id(row)] for row in kept)) > most:
        steps = list(dict.fromkeys(row["step"] for row in kept))
        if len(steps) <= 2:
            return kept[: max(1, len(kept) * most // size)]
        wanted = max(2, min(len(steps) - 1, len(steps) * most // size))
        chosen = {steps[round(place * (len(steps) - 1) / (wanted - 1))] for place in range(wanted)}
        kept = [row for row in kept if row["step"] in chosen]
    return kept


def pairs_of(run: RunFiles, most: int) -> dict[str, Any]:
    """Pair greedy answers before and after, changed ones first."""
    greedy = [row for row in run.answers if row.get("greedy")]
    steps = sorted({row["step"] for row in greedy})
    if len(steps) < 2:
        return {"steps": steps, "counts": {}, "rows": []}
    before, after = (  # an evaluation's answers by the name and text of the prompt
        {(row["prompt_id"], json.dumps(row.get("prompt"))): row for row in greedy if row["step"] == step}
        for step in (steps[0], steps[-1])
    )
    rows = [_pair(before[prompt], row) for prompt, row in after.items() if prompt in before]
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in KINDS}
    size, shown = 0, []
    for row in _round_robin(rows):
        size += len(json.dumps(row, default=str))
        if size > most:
            break
        shown.append(row)
    shown.sort(key=lambda row: KINDS.index(row["kind"]))
    return {"steps": [steps[0], steps[-1]], "counts": counts, "rows": shown, "evaluated": prompts_of(run)}


KINDS = ("lost", "gained", "stayed the same", "stayed wrong", "stayed right")


def _round_robin(rows: Sequence[Row]) -> list[Row]:
    """Order rows so that kinds take turns."""
    of_kind = [[row for row in rows if row["kind"] == kind] for kind in KINDS]
    longest = max(map(len, of_kind), default=0)
    return [own[place] for place in range(longest) for own in of_kind if place < len(own)]


def _pair(before: Row, after: Row) -> Row:
    kinds = {(True, False): "lost", (False, True): "gained", (True, True): "stayed right"}
    kind = kinds.get((bool(before.get("correct")), bool(after.get("correct"))), "stayed wrong")
    # Rewards that do not say what is right have a more and a less
    first, last = number(before.get("reward")) or 0.0, number(after.get("reward")) or 0.0
    own = "gained" if last > first else "lost" if last < first else "stayed the same"
    return {
        "kind": kind if "correct" in after else own,
        "id": after["prompt_id"],
        "prompt": cut(after.get("prompt"), 1500),
        "columns": {name: cut(plain(value), 300) for name, value in (after.get("columns") or {}).items()},
        "before": {"text": cut(before.get("completion"), 1500), "reward": before.get("reward")},
        "after": {"text": cut(after.get("completion"), 1500), "reward": after.get("reward")},
    }
