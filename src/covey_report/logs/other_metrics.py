"""Read the metrics of TRL and verl under covey's names.

TRL keeps them in `log_history` of trainer_state.json, verl prints `step:N - name:value - ...` or writes JSON lines of
{"step", "data"} with trainer.logger=file.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from covey.system.disk import read_regular
from covey.system.jsonl import object_of
from covey.system.lookup import read_table
from covey_report.logs.read import MAX_BYTES, Row, RunFiles

NAMES = read_table(Path(__file__).with_name("names.yaml"))
TRL_LOG, VERL = NAMES["trl_log"], NAMES["verl"]
TRL = TRL_LOG | NAMES["trl"]
PART = re.compile(r"rewards/([^/]+)/(mean|std)")
RIGHT = re.compile(r"accura|correct|acc\b|answer|solved", re.IGNORECASE)
VERL_HELD_OUT = re.compile(r"val(?:-core|-aux)?/.*/(acc|reward|score)/mean@\d+|val/test_score/.*")
LINE = re.compile(r"step:\s*(\d+) - (.*)")
NUMBER = re.compile(r"np\.(?:float|int)\d+\((.*)\)")
LOGS = ("*.jsonl", "*.log", "*.txt", "*.out")
STATE = "trainer_state.json"


def read_other_metrics(path: Path) -> RunFiles | None:
    """Read metrics of TRL or verl, None if there are none."""
    for file in [path] if path.is_file() else _candidates(path):
        rows = of_trl(file) if file.suffix == ".json" else of_verl(file)
        steps, looks = list(rows[0]), list(rows[1])
        if steps:
            return RunFiles(path, steps=_merged(steps), looks=_merged(looks))
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield files that may hold metrics: TRL's newest state first, then logs."""
    saved = [path for path in folder.glob(f"checkpoint-*/{STATE}") if path.parent.name[11:].isdecimal()]
    newest = sorted(saved, key=lambda path: -int(path.parent.name[11:]))
    yield from (path for path in (folder / STATE, *newest) if path.is_file())
    for pattern in LOGS:
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())


def of_trl(file: Path) -> tuple[list[Row], list[Row]]:
    """Read training and evaluation rows of a trainer_state.json."""
    history = object_of(read_regular(file, MAX_BYTES)).get("log_history", [])
    rows = [row for row in history if isinstance(row, dict) and type(row.get("step")) is int]
    training = [_renamed(row, TRL) for row in rows if "reward" in row or "loss" in row]
    looks = [{"step": row["step"], **_held_out_of_trl(row)} for row in rows if "eval_reward" in row]
    return training, looks


def _renamed(row: Mapping[str, Any], names: Mapping[str, str]) -> Row:
    found: Row = {"step": row["step"]}
    for name, value in row.items():
        if (part := PART.fullmatch(name)) is not None:
            found[f"reward{'_std' if part[2] == 'std' else ''}/{part[1]}"] = value
        elif name in names:
            found[names[name]] = value
        elif name != "step":
            found[name] = value
    return found


def _held_out_of_trl(row: Mapping[str, Any]) -> Row:
    found: Row = {"reward_mean": row["eval_reward"]}
    for name, value in row.items():
        part = PART.fullmatch(name.removeprefix("eval_"))
        if name.startswith("eval_") and part is not None and part[2] == "mean" and RIGHT.search(part[1]):
            found["accuracy"] = value
    return found


def of_verl(file: Path) -> tuple[list[Row], list[Row]]:
    """Read training and evaluation rows of a log of verl."""
    training, looks = [], []
    for line in read_regular(file, MAX_BYTES).decode("utf-8", "replace").splitlines():
        row = _numbers(line)
        if row is None:
            continue
        if any(name.startswith(("critic/", "actor/", "response_length/")) for name in row):
            training.append(_renamed(row, VERL))
        held_out = {n: one for n, one in row.items() if VERL_HELD_OUT.fullmatch(n) and isinstance(one, int | float)}
        if held_out:
            looks.append({"step": row["step"], **_held_out_of_verl(held_out)})
    return training, looks


def _numbers(line: str) -> Row | None:
    if line.startswith("{"):
        found = object_of(line)
        data, step = found.get("data"), found.get("step")
        return {**data, "step": step} if isinstance(data, dict) and type(step) is int else None
    match = LINE.search(line)
    if match is None:
        return None
    row: Row = {"step": int(match[1])}
    for word in match[2].split(" - "):
        name, _, text = word.strip().rpartition(":")
        text = NUMBER.sub(r"\1", text.strip())
        try:
            row[name] = float(text)
        except ValueError:
            continue
    return row


def _held_out_of_verl(row: Mapping[str, float]) -> Row:
    right = [value for name, value in row.items() if "/acc/" in name]
    rewards = [value for name, value in row.items() if "/acc/" not in name] or right
    return {"reward_mean": fmean(rewards)} | ({"accuracy": fmean(right)} if right else {})


def _merged(rows: Sequence[Row]) -> list[Row]:
    found: dict[int, Row] = {}
    for row in rows:
        found.setdefault(row["step"], {}).update(row)
    return [found[step] for step in sorted(found)]
