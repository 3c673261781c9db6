"""Columns of real runs in one small file, from which tests and tables are made without training."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey_doctor.log import NOT_SHOWN, RunLog
from covey_report.runs.outcome import not_shown

KEPT = Path(__file__).resolve().parents[3] / "tests" / "data" / "doctor_runs.json.gz"
COLUMNS = (
    *("sampled_reward_mean", "zero_std_fraction", "all_correct_fraction", "all_wrong_fraction", "mean_group_std"),
    *("completion_length_mean", "truncated_fraction", "unique_fraction", "disagreement_fraction", "staleness_max"),
    *(
        "advantage_top_share",
        "unscored_fraction",
        "entropy",
        "grad_norm",
        "clip_fraction",
        "clip_low",
        "clip_high",
        "kl",
    ),
    *("mismatch", "mismatch_kl", "mismatch_max", "ess_fraction", "skipped", "loss", "num_groups"),
    *(
        "num_groups_sampled",
        "num_rollouts_trained",
        "tokens_per_second",
        "dropped/unscored_rollouts",
        "reward/form",
        "reward/correct",
    ),
    *("advantage_agreement", "update_gain", "update_gain_error"),
)
SETTINGS = (
    *(
        "num_steps",
        "model.precision",
        "model.lora_rank",
        "engine.name",
        "max_staleness",
        "curriculum.name",
        "group_size",
    ),
    *("algorithm.group_filter", "optimizer.lr", "sampling.max_tokens", "evaluation.num_prompts", "model.kind"),
)


def kept_of(folder: Path) -> dict[str, Any]:
    """Return what is kept of a run: columns of four digits, settings, whether each held-out prompt was solved."""
    from covey_report.doctor.health import read_for_doctor, run_log

    run = read_for_doctor(folder)
    log = run_log(run)
    return {
        "steps": [log.steps[0], log.steps[-1]] if log.steps else [],
        "columns": {name: _short(log.columns[name]) for name in COLUMNS if name in log.columns},
        "look_steps": log.look_steps,
        "looks": {name: _short(column) for name, column in log.looks.items()},
        "settings": {name: log.settings.get(name) for name in SETTINGS},
        "solved": {str(row["step"]): row["right"] for row in run.verdicts},
        "prompts": [[group["prompt_id"] for group in row["groups"]] for row in run.updates] if _is_small(run) else [],
        "gain": (log.summary.get("gain") or {}).get("accuracy"),
        "status": log.summary.get("status"),
        "error": log.error,
    }


def _is_small(run: Any) -> bool:
    return len({group["prompt_id"] for row in run.updates for group in row["groups"]}) < 100


def _short(column: list[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.4g}") for value in column]


def log_of_kept(kept: Mapping[str, Any]) -> RunLog:
    """Return the log of a kept run."""
    steps = list(range(kept["steps"][0], kept["steps"][1] + 1)) if kept["steps"] else []
    verdicts = [
        {"step": int(step), "right": digits} | {name: [*map(str, range(len(digits)))] for name in ("prompts", "ids")}
        for step, digits in kept["solved"].items()
    ]
    asked = kept["settings"].get("evaluation.num_prompts")
    looks = [{"accuracy": {"value": value}, "num_prompts": asked} for value in kept["looks"].get("accuracy", ())]
    gain = {"accuracy": kept["gain"]} if kept["gain"] else None
    ends = {"before": looks[0], "after": looks[-1]} if len(looks) > 1 else {}
    rows = [{"num_groups": len(names), "groups": [{"prompt_id": name} for name in names]} for names in kept["prompts"]]
    summary = {"status": kept["status"], "gain": gain, **ends}
    return RunLog(
        steps=steps,
        columns=dict(kept["columns"]),
        look_steps=list(kept["look_steps"]),
        looks=dict(kept["looks"]),
        settings=kept["settings"],
        updates=rows,
        verdicts=verdicts,
        summary=summary | {NOT_SHOWN: not_shown(summary)},
        error=kept["error"],
    )


def write_kept(found: Mapping[str, Any]) -> None:
    text = json.dumps(found, separators=(",", ":")).encode()
    KEPT.write_bytes(gzip.compress(text, 9, mtime=0))


def read_rows() -> dict[str, Any]:
    """Return what is kept of each run, as it stands in the file."""
    found: dict[str, Any] = json.loads(gzip.decompress(KEPT.read_bytes()))
    return found


def read_kept() -> dict[str, RunLog]:
    """Return the kept runs by name."""
    return {name: log_of_kept(kept) for name, kept in read_rows().items()}
