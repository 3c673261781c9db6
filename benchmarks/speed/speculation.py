"""Tokens a second with drafts and without, in covey's engine, of real models on real prompts.

    python -m benchmarks.speed.speculation        # both models, both precisions; writes results/real_runs.json
    python -m benchmarks.speed.speculation --models smollm2-135m --precision bfloat16 --rows 4 --tasks gsm8k

Groups of eight answers, of prompts for which a group was sampled before, as in the second epoch of a run. For each
prompt both engines take turns in one process, and their tokens must be the same. A line gives the tokens a second of
both, the ratio over all prompts and the least and most of one prompt, and tokens a pass. `gsm8k` and `mbpp` read rows
from COVEY_SHARED or --data; `short` asks for one sentence.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.demo.runs import machine
from benchmarks.real.models import model_folder

RESULTS = Path(__file__).resolve().parents[1] / "results" / "real_runs.json"
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b")
GROUP = 8


def _read(path: Path, number: int) -> list[dict[str, Any]]:
    with path.open() as lines:
        return [json.loads(line) for line in islice(lines, number)]


def gsm8k(data: Path, number: int) -> list[str]:
    asked = "Reason step by step, and write the answer after ####."
    return [f"{row['question']}\n{asked}" for row in _read(data / "gsm8k" / "train.jsonl", number)]


def mbpp(data: Path, number: int) -> list[str]:
    rows = _read(data / "code" / "mbpp_sanitized.jsonl", number)
    return ["\n".join([row["prompt"], "Your code should pass these tests:", *row["test_list"]]) for row in rows]


def short(data: Path, number: int) -> list[str]:
    subjects = ("the sea", "an old clock", "bread", "a lost letter", "winter", "a train at night", "honey", "the moon")
    return [f"Write one sentence about {subject}." for subject in subjects[:number]]


TASKS = {"gsm8k": gsm8k, "mbpp": mbpp, "short": short}


class Side:
    """An engine of one number of rows, and what it took."""

    def __init__(self, policy: Any, num_rows: int, speculation: str) -> None:
        from covey.engine.native.engine import NativeEngine

        self.engine = NativeEngine(policy, 2**31, num_rows, speculation=speculation)
        self.seconds: list[float] = []

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Any) -> list[tuple[int, ...]]:
        """Sample a group of each prompt at once; note the seconds."""

        async def run() -> list[Any]:
            return await asyncio.gather(*(self.engine.generate(prompt, GROUP, sampling) for prompt in prompts))

        started = time.perf_counter()
        groups = asyncio.run(run())
        self.seconds.append(time.perf_counter() - started)
        return [completion.token_ids for group in groups for completion in group]


def compare(policy: Any, prompts: Sequence[Sequence[int]], num_rows: int, sampling: Any) -> dict[str, Any]:
    """Return the figures of both engines on the prompts, as many at once as fill the rows."""
    from dataclasses import replace

    plain, drafting = (Side(policy, num_rows, word) for word in ("off", "auto"))
    at_once = max(1, num_rows // GROUP)
    # The first epoch: what it writes does not depend on the rows, so it is sampled at once
    drafting.engine._limits = replace(drafting.engine._limits, max_rows=64)
    drafting.engine._reset()
    drafting.sample(prompts, replace(sampling, seed=1))
    drafting.engine._limits = replace(drafting.engine._limits, max_rows=num_rows)
    drafting.engine._reset()
    for side in (plain, drafting):
        side.sample(prompts[:1], replace(sampling, max_tokens=8))
    sides, num_tokens = [plain, drafting], []
    drafting.engine.take_stats()
    for side in sides:
        side.seconds.clear()
    for first in range(0, len(prompts), at_once):
        found = [side.sample(prompts[first : first + at_once], sampling) for side in sides]
        assert found[0] == found[1], "drafts must change no token"
        num_tokens.append(sum(map(len, found[0])))
        sides.reverse()  # the one that goes first changes
    stats = drafting.engine.take_stats()
    ratios = [a / b for a, b in zip(plain.seconds, drafting.seconds, strict=True)]
    return {
        "tokens": sum(num_tokens),
        "plain": sum(num_tokens) / sum(plain.seconds),
        "drafted": sum(num_tokens) / sum(drafting.seconds),
        "ratio": sum(plain.seconds) / sum(drafting.seconds),
        "ratios": ratios,
        "median": statistics.median(ratios),
        "tokens_per_pass": stats.sampled_tokens / (stats.sampled_tokens - stats.accepted_tokens),
        "drafted_per_pass": stats.drafted_tokens / (stats.sampled_tokens - stats.accepted_tokens),
        "saved_seconds": stats.saved_seconds,
    }


def token_ids(tokenizer: Any, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(text + "\n")["input_ids"])
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--precision", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 64])
    parser.add_argument("--tasks", nargs="+", default=[*TASKS])
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("COVEY_SHARED", "shared")) / "data")
    options = parser.parse_args(argv)
    from covey.policy.models.loading import load_policy
    from covey.policy.settings import ModelConfig
    from covey.types import Sampling

    for name in options.models:
        for precision in options.precision:
            policy = load_policy(ModelConfig(name=str(model_folder(name)), precision=precision))
            for task in options.tasks:
                prompts = [token_ids(policy.tokenizer, text) for text in TASKS[task](options.data, options.prompts)]
                for temperature in options.temperature:
                    sampling = Sampling(temperature=temperature, max_tokens=options.tokens, seed=2)
                    for num_rows in options.rows:
                        found = compare(policy, prompts, num_rows, sampling)
                        place = f"speculation, {name}, {precision}, {task}, temperature {temperature}, {num_rows} rows"
                        _keep(place, found)
    return 0


def _keep(place: str, found: dict[str, Any]) -> None:
    """Print a line, and write it beside those of other runs."""
    print(
        f"{place:84} {found['plain']:6.0f} -> {found['drafted']:6.0f} tokens/s, x {found['ratio']:.2f} "
        f"({min(found['ratios']):.2f} to {max(found['ratios']):.2f}), {found['tokens_per_pass']:.2f} tokens and "
        f"{found['drafted_per_pass']:.2f} drafts a pass",
        flush=True,
    )
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    results[place] = {**found, "machine": machine()}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
