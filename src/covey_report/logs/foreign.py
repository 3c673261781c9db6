"""Logs of other tools, read for the report.

TRL keeps completions/completions_NNNNN.parquet, verl N.jsonl in its rollout_data_dir, verifiers traces.jsonl.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from covey.run.folder import CONFIG, TRACES
from covey.system.disk import as_written, read_regular
from covey.system.jsonl import object_of
from covey_report.logs.read import MAX_BYTES, Row, RunFiles, read_rows, read_run
from covey_report.page.bands import mean_band

TRL_COLUMNS = ("step", "prompt", "completion", "advantage")


def read_any(folder: Path) -> RunFiles:
    """Read a run of covey, TRL, verl or verifiers. ValueError."""
    if (folder / CONFIG).is_file():
        return read_run(folder)
    for find in (_of_trl, _of_verl, _of_verifiers):
        with as_written(folder):
            rows = list(find(folder))
        if rows:
            return _as_run(folder, rows)
    raise ValueError(
        f"{folder} is no run folder: it has no {CONFIG}, no completions/*.parquet of TRL, no N.jsonl of verl "
        "and no traces.jsonl of verifiers"
    )


def _of_trl(folder: Path) -> Iterator[Row]:
    paths = sorted((folder / "completions").glob("completions_*.parquet")) or sorted(
        folder.glob("completions_*.parquet")
    )
    if not paths:
        return
    from pyarrow import parquet

    for path in paths:
        for row in parquet.read_table(path).to_pylist():
            parts = {name: row[name] for name in row if name not in TRL_COLUMNS and isinstance(row[name], int | float)}
            found = _answer(row["step"], row["prompt"], row["completion"], sum(parts.values()))
            yield found | {"parts": parts, "advantage": row.get("advantage")}


def _of_verl(folder: Path) -> Iterator[Row]:
    for path in sorted((path for path in folder.glob("*.jsonl") if path.stem.isdecimal()), key=lambda p: int(p.stem)):
        for row in read_rows(path):
            if "output" in row and "score" in row:
                found = _answer(row["step"], row.get("input"), row["output"], row["score"])
                yield found | {"columns": {"gts": row.get("gts")}}


def _of_verifiers(folder: Path) -> Iterator[Row]:
    """Read records of verifiers, of step 1 if their info has none."""
    path = folder / TRACES
    if not path.is_file():
        return
    for line in read_regular(path, MAX_BYTES).split(b"\n"):
        if "nodes" not in (record := object_of(line)):
            continue
        messages = [node["message"] for node in record["nodes"]]
        given = [m for m, node in zip(messages, record["nodes"], strict=True) if not node.get("sampled")]
        written = [m for m, node in zip(messages, record["nodes"], strict=True) if node.get("sampled")]
        rewards = {name: _value(one) for name, one in (record.get("rewards") or {}).items() if one is not None}
        step = (record.get("info") or {}).get("step")
        answer = "\n".join(str(m.get("content")) for m in written)
        yield {**_answer(step if type(step) is int else 1, given, answer, sum(rewards.values())), "parts": rewards}


def _value(reward: Any) -> float:
    if isinstance(reward, Mapping):
        return float(reward["score"]) * float(reward.get("weight", 1))
    return float(reward)


def _answer(step: Any, prompt: Any, completion: Any, reward: Any) -> Row:
    return {
        "step": int(step),
        "prompt": prompt,
        "prompt_id": _text(prompt)[-60:],
        "completion": _text(completion),
        "reward": float(reward),
        "parts": {},
        "advantage": None,
        "columns": {},
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(turn.get("content")) if isinstance(turn, Mapping) else str(turn) for turn in value)
    return str(value)


def _as_run(folder: Path, rows: Sequence[Row]) -> RunFiles:
    """Convert answers to the rows of a run, groups without tokens."""
    steps, updates, traces = [], [], []
    for step, answers in groupby(sorted(rows, key=itemgetter("step")), itemgetter("step")):
        groups: dict[str, list[Row]] = {}
        for row in answers:
            groups.setdefault(_text(row["prompt"]), []).append(row)
        rewards = {name: [row["reward"] for row in group] for name, group in groups.items()}
        flat = [reward for group in rewards.values() for reward in group]
        lengths = [len(row["completion"]) for group in groups.values() for row in group]
        steps.append(
            {
                "step": step,
                "sampled_reward_mean": fmean(flat),
                "zero_std_fraction": fmean(float(len(set(group)) < 2) for group in rewards.values()),
                "characters_mean": mean_band(lengths).value,
            }
        )
        shown = [{"prompt_id": name[-60:], "rewards": group} for name, group in rewards.items()]
        updates.append({"step": step, "num_groups": len(groups), "groups": shown})
        traces += [_group(step, group) for group in groups.values()]
    return RunFiles(
        folder, summary={"status": "completed", "steps": len(steps)}, steps=steps, updates=updates, traces=traces
    )


def _group(step: int, rows: Sequence[Row]) -> Row:
    first = rows[0]
    rollouts = [{**row, "num_tokens": None, "finish_reason": None} for row in rows]
    kept = {name: first[name] for name in ("prompt_id", "prompt", "columns")}
    return {"step": step, "reason": "logged", "dropped": None, "failures": [], "rollouts": rollouts} | kept
