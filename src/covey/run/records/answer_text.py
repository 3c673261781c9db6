"""Answers as text for people, harmless on a terminal."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from covey.system.text.escaping import escape
from covey.system.text.format import number_of

PROMPT_CHARACTERS, ANSWER_CHARACTERS, COLUMN_CHARACTERS = 600, 1200, 80
"""Most characters shown of a prompt, of an answer and of a column of the prompt's row."""
NAMES = frozenset(
    (
        *("step", "time", "environment", "prompt_id", "prompt", "columns", "completion", "num_tokens", "reward"),
        *("stop_reason", "turns"),
        *("parts", "finish_reason", "policy_version", "advantage", "dropped", "kind", "greedy", "correct"),
    )
)
"""Columns of a row that are covey's; any other was noted by a reward function."""
INDENT = " " * 10


def as_text(row: Mapping[str, Any]) -> str:
    """Show a row of rollouts.jsonl or evaluations.jsonl on a few lines.

    >>> print(as_text(row))
    step 3, train-17: reward 1.000 (correct 1, format 0.1), advantage +0.71, 3 tokens
      prompt  41+7=
      answer  48
      row     answer: 48
    """
    lines = [
        f"step {row['step']}, {escape(str(row['prompt_id']))}: {describe_reward(row)}",
        _block("prompt", shorten(join_messages(row["prompt"]), PROMPT_CHARACTERS)),
        _block("answer", shorten(join_messages(row["completion"]), ANSWER_CHARACTERS)),
    ]
    noted = {name: value for name, value in row.items() if name not in NAMES}
    for label, columns in (("row", row["columns"]), ("noted", noted)):
        cells = [f"{name}: {shorten(_value(value), COLUMN_CHARACTERS)}" for name, value in columns.items()]
        lines += [_block(label, ", ".join(cells), keep="")] if cells else []
    return "\n".join(lines)


def episode_text(row: Mapping[str, Any]) -> str:
    """Show an episode turn by turn, with each turn's reward.

    >>> print(episode_text(row))
    step 60, train-17: reward 1.000 (won 1), 2 turns, completed, 6 tokens
      prompt  ?
      policy  15;
      user    >
      policy  17;   (+0.1)
    """
    lines = [
        f"step {row['step']}, {escape(str(row['prompt_id']))}: {describe_reward(row)}",
        _block("prompt", shorten(join_messages(row["prompt"]), PROMPT_CHARACTERS)),
    ]
    said = row["completion"]
    messages = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
    turns = iter(row["turns"])
    for message in messages:
        text = shorten(_content(message), ANSWER_CHARACTERS)
        if message["role"] != "assistant":
            named = f" {message['name']}" if "name" in message else ""
            lines.append(_block(f"{escape(str(message['role']))}{escape(str(named))}", text))
            continue
        turn: Mapping[str, Any] = next(turns, {})
        notes = [f"{turn['reward']:+.3g}"] if turn.get("reward") else []
        notes += ["void"] if turn.get("is_void") else []
        notes += [_value(turn["info"])] if turn.get("info") else []
        lines.append(_block("policy", f"{text}   ({', '.join(notes)})" if notes else text))
    return "\n".join(lines)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text + (f" {json.dumps(message['tool_calls'], ensure_ascii=False)}" if message.get("tool_calls") else "")


def describe_reward(row: Mapping[str, Any]) -> str:
    """Describe the answer's reward and end in one line."""
    parts = ", ".join(f"{escape(name)} {_number(value)}" for name, value in row["parts"].items())
    facts = [] if row["reward"] is None else [f"reward {row['reward']:.3f}" + (f" ({parts})" if parts else "")]
    if row.get("advantage") is not None:
        facts.append(f"advantage {row['advantage']:+.2f}")
    if row.get("dropped") is not None:
        facts.append(f"not trained: {row['dropped']}")
    if "greedy" in row:
        verdict = (", right" if row["correct"] else ", wrong") if "correct" in row else ""
        facts.append(("greedy" if row["greedy"] else "sampled") + verdict)
    if "stop_reason" in row:
        of_turns = [turn["reward"] for turn in row["turns"]]
        earned_by = f" of {' '.join(f'{_number(r)}' for r in of_turns)}" if any(of_turns) else ""
        facts.append(f"{number_of(len(of_turns), 'turn')}{earned_by}, {row['stop_reason']}")
    ending = " (cut by sampling.max_tokens)" if row["finish_reason"] == "length" else ""
    return ", ".join([*facts, f"{row['num_tokens']} tokens{ending}"])


def join_messages(text: str | Sequence[Mapping[str, str]]) -> str:
    """Join a conversation's messages, each after its role; text stays."""
    if isinstance(text, str):
        return text
    return "\n".join(f"{message['role']}: {_content(message)}" for message in text)


def shorten(text: str, most: int) -> str:
    """Cut the middle of a long text.

    >>> shorten("x" * 1000, 4)
    'xx … (996 characters) … xx'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters) … {text[-half:]}"


def _block(label: str, text: str, keep: str = "\n") -> str:
    return f"  {label:<7} " + escape(text, keep=keep).replace("\n", f"\n{INDENT}")


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and math.isfinite(value) else str(value)
