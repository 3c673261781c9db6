"""Bounded logs of answers: rollouts.jsonl and evaluations.jsonl."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from covey.config.schema import OutputConfig
from covey.rollouts.source import Dropped
from covey.run.evaluate import Answers, Evaluation
from covey.system.jsonl import JsonlWriter
from covey.system.text.format import timestamp
from covey.types import UNREWARDED, Group, Prompt, Rollout, Turn

COLUMN_CHARACTERS, COLUMNS_CHARACTERS = 1000, 4000
"""Most characters of one column of a prompt's row, and of all its columns together."""

MORE_NAMES = ("policy_version", "advantage", "dropped", "kind", "greedy", "correct")
"""Columns of one of the files besides those of both."""

AnswerRow = dict[str, Any]
"""A line of either file: `answer_row` has the columns of both."""


class AnswerLog:
    """A file of rows, bounded over restarts too."""

    def __init__(self, path: Path, max_rows: int, *, wait: bool = False) -> None:
        """Open the log for at most `max_rows` rows; `wait` as for JsonlWriter."""
        self._file = JsonlWriter(path, wait=wait)
        self._left = max_rows - count_lines(path)

    def log(self, rows: Sequence[AnswerRow]) -> None:
        """Write rows while there is room."""
        for row in rows[: max(0, self._left)]:
            self._file.write(row)
            self._left -= 1

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class StepRollout:
    """A rollout of a step."""

    prompt: Prompt
    rollout: Rollout
    advantage: float | None
    """None where its group was not trained."""
    dropped: str | None
    """Reason for that."""
    of_turns: Sequence[float] = ()
    """The advantage of each turn, where they have their own."""

    def row(self, step: int) -> AnswerRow:
        """Describe it as a line of rollouts.jsonl."""
        own = {"policy_version": self.rollout.policy_version, "advantage": self.advantage, "dropped": self.dropped}
        row = answer_row(step, self.prompt, self.rollout) | own
        if "turns" in row and self.of_turns:
            pairs = zip(row["turns"], self.of_turns, strict=True)
            row["turns"] = [turn | {"advantage": float(value)} for turn, value in pairs]
        return row


def list_sampled(
    groups: Sequence[Group],
    advantages: Sequence[float],
    dropped: Sequence[Dropped],
    of_turns: Sequence[Sequence[float]] = (),
) -> list[StepRollout]:
    """List the rollouts of a step.

    `advantages` has one value per rollout of `groups`, `of_turns` those of its turns, if any.
    """
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    each = of_turns or [()] * len(pairs)
    trained = [StepRollout(*pair, float(a), None, own) for pair, a, own in zip(pairs, advantages, each, strict=True)]
    left_out = [StepRollout(d.group.prompt, rollout, None, d.reason) for d in dropped for rollout in d.group.rollouts]
    return trained + left_out


def spread_over(found: Sequence[StepRollout], most: int) -> list[StepRollout]:
    """Choose at most `most` rollouts, evenly spread over prompts.

    Dropped groups get a quarter of the places, and those that trained rollouts leave free.
    """
    trained = [one for one in found if one.dropped is None]
    left_out = [one for one in found if one.dropped is not None]
    num_left_out = min(len(left_out), max(most // 4, most - len(trained)))
    chosen = [trained[index] for index in spread(len(trained), most - num_left_out)]
    return chosen + [left_out[index] for index in spread(len(left_out), num_left_out)]


def best_to_worst(found: Sequence[StepRollout], most: int) -> list[StepRollout]:
    """Choose rollouts from the highest to the lowest reward, both included."""
    ordered = sorted(found, key=lambda one: -one.rollout.reward.value)
    last = len(ordered) - 1
    most = min(most, len(ordered))
    return [ordered[round(place * last / max(1, most - 1))] for place in range(most)]


def answers_per_evaluation(output: OutputConfig, every: int, num_steps: int) -> int:
    """Return the answers to log per evaluation, with room for the last."""
    num_evaluations = 2 + (num_steps - 1) // every if every else 2
    return min(output.answers_per_evaluation, max(1, output.max_rollout_rows // num_evaluations))


def evaluation_rows(step: int, answers: Answers, correct_above: float | None, most: int) -> list[AnswerRow]:
    """Choose answers of an evaluation, greedy ones first, evenly spread.

    `kind` is that of metrics.jsonl, by which a resume cuts rows. Without `correct_above` rewards do not tell what is
    right.
    """
    greedy = [(group.prompt, rollout) for group in answers.greedy for rollout in group.rollouts]
    sampled = [(group.prompt, rollout) for group in answers.sampled for rollout in group.rollouts]
    chosen = [greedy[index] for index in spread(len(greedy), most)]
    num_greedy = len(chosen)
    chosen += [sampled[index] for index in spread(len(sampled), most - num_greedy)]
    rows = []
    for place, (prompt, rollout) in enumerate(chosen):
        told = {} if correct_above is None else {"correct": rollout.reward.value >= correct_above}
        rows.append(answer_row(step, prompt, rollout) | {"kind": "evaluate", "greedy": place < num_greedy, **told})
    return rows


def answer_row(step: int, prompt: Prompt, rollout: Rollout) -> AnswerRow:
    """Describe an answer as a row.

    `columns` are the rest of the prompt's row, such as the gold answer, `completion` is text, or after several turns
    the messages since the prompt, and `num_tokens` counts the policy's tokens. An episode has its `stop_reason` and
    `turns` besides. Notes of reward functions follow under their names; one of covey's becomes extra/NAME.
    """
    row = {
        "step": step,
        "time": timestamp(),
        "environment": prompt.environment,
        "prompt_id": prompt.id,
        "prompt": prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text],
        "columns": bound_columns(prompt.columns),
        "completion": [dict(message) for message in rollout.messages] or rollout.text,
        "num_tokens": rollout.num_loss_tokens,
        "reward": None if UNREWARDED in rollout.reward.parts else rollout.reward.value,
        "parts": {name: value for name, value in rollout.reward.parts.items() if name != UNREWARDED},
        "finish_reason": rollout.finish_reason,
    }
    row |= episode_facts(rollout)
    # Notes never take the place of covey's own columns
    extra = rollout.reward.extra.items()
    return row | {f"extra/{name}" if name in row or name in MORE_NAMES else name: value for name, value in extra}


def episode_facts(rollout: Rollout) -> dict[str, Any]:
    """Return an episode's end and turns, nothing for a single answer."""
    if rollout.stop_reason is None:
        return {}
    return {"stop_reason": rollout.stop_reason, "turns": [_turn_row(turn) for turn in rollout.turns]}


def _turn_row(turn: Turn) -> dict[str, Any]:
    own = {"num_tokens": turn.end - turn.start, "reward": turn.reward, "state": turn.state, "is_void": turn.is_void}
    return own | ({"info": bound_columns(turn.info)} if turn.info else {})


def bound_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns as JSON data of about 4000 characters.

    >>> bound_columns({"answer": 48, "tests": ["a" * 5000]})
    {'answer': 48, 'tests': '["aaa...a...'}
    """
    left = COLUMNS_CHARACTERS
    kept: dict[str, Any] = {}
    for name, value in columns.items():
        text = _as_json(value)
        room = min(left, COLUMN_CHARACTERS)
        if room <= 0:
            break
        shown = value if isinstance(value, str) else text
        kept[str(name)] = json.loads(text) if len(text) <= room else shown[:room] + "…"
        left -= len(text)
    return kept


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # keys that JSON has not, or a value that holds itself
        return json.dumps(str(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def verdict_row(step: int, found: Evaluation, prompts: Sequence[str], ids: Sequence[str]) -> dict[str, Any]:
    """Make a line of verdicts.jsonl, which `covey_doctor.verdicts` reads.

    `prompts` has what tells each from others (`fingerprint.of_prompts`), `right` a character each: 1, 0, - for neither;
    `rewards` are means of samples, of six digits, null where none was scored.
    """
    return {
        "step": step,
        "kind": "evaluate",
        "time": timestamp(),
        "prompts": prompts,
        "ids": ids,
        "right": "".join({1.0: "1", 0.0: "0"}.get(value, "-") for value in found.correct_greedy),
        "rewards": [None if math.isnan(value) else float(f"{value:.6g}") for value in found.mean_reward],
        "num_right": list(found.num_right) if found.accuracy else [],
        "num_scored": list(found.num_scored) if found.accuracy else [],
    }


def spread(count: int, wanted: int) -> list[int]:
    """Choose at most `wanted` indices below `count`, evenly spaced.

    >>> spread(10, 3)
    [0, 3, 6]
    """
    wanted = max(0, min(count, wanted))
    return [index * count // wanted for index in range(wanted)]


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)
