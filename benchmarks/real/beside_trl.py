"""Steps of one script beside each other, once with TRL's import and once with covey's, on a real model.

    python -m benchmarks.real.beside_trl MODEL_FOLDER [--precision bfloat16] [--lora 16] [--steps 4] [--rounds 2]
    python -m benchmarks.real.beside_trl MODEL_FOLDER --rows gsm8k/train.jsonl --prompts 64 --max-tokens 320

Both read the same rows, rewards and settings, by default 8 prompts x 8 answers of at most 32 tokens, which end where
the model ends them. Each is a process of its own and they take turns, so a slower minute of the machine meets both. The
first step of a process is a warm-up; of covey's the first four, since it looks a second time at its first three updates
and then at every fifth: the five that count hold one look. Answers differ, as their draws do, so tokens a second stand
beside seconds a step.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo.runs import machine
from benchmarks.speed.contest import SPIN, TUNED_MALLOC

RESULTS = Path(__file__).resolve().parents[1] / "results" / "real_runs.json"
GROUP = 8
WARM_UP = {"trl": 1, "covey": 4, "general": 4}
LIBRARIES = ("trl", "covey")
LOOKED_AT = 5
"""Steps of covey between two looks at an update; so many count."""
THINGS = ("ship", "eagle", "market", "carrot", "violin", "volcano", "canoe", "bridge")
ASK = "What is a {}? Answer in one sentence of at most 12 words."


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Chat prompts with what their answers have to name: things, or the numbers of word problems."""
    if options.rows is None:
        named = [(ASK.format(thing), thing) for thing in THINGS]
    else:
        lines = [json.loads(line) for line in options.rows.read_text().splitlines()]
        named = [(line["question"], line["answer"].rpartition("####")[2].strip()) for line in lines]
    return [{"prompt": [{"role": "user", "content": ask}], "wanted": word} for ask, word in named[: options.prompts]]


def names_it(completions: list[Any], wanted: list[str], **columns: Any) -> list[float]:
    """Names what is wanted: a half. In at most 12 words: the other half."""
    texts = [said[-1]["content"] for said in completions]
    return [
        0.5 * (word in text.lower()) + 0.5 * (len(text.split()) <= 12) for text, word in zip(texts, wanted, strict=True)
    ]


def settings(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The fields of GRPOConfig, TRL's own names."""
    import torch

    return {
        "output_dir": folder,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.prompts * GROUP // options.micro_batch,
        "num_generations": GROUP,
        "max_completion_length": options.max_tokens,
        "learning_rate": 2e-5,
        "beta": 0.0,
        "max_steps": options.steps if options.worker == "trl" else WARM_UP["covey"] + LOOKED_AT,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": options.precision == "bfloat16",
        # Without it, reference kernels of layers with a state keep more than memory has
        "gradient_checkpointing": options.worker == "general",
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
    }


def train(library: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return seconds and completion tokens of each step."""
    if library != "trl":
        from covey.system import machine as processors

        processors.prepare()  # as the command does, before torch is imported
    if library == "general":
        refuse_fast_path()
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback

    if library != "trl":
        from covey.trl import GRPOConfig, GRPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        """Notes when each step ends, and the mean length that is logged of it."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.lengths: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

        def on_log(self, *_: Any, **given: Any) -> None:
            if "completions/mean_length" in given["logs"]:
                self.lengths.append(given["logs"]["completions/mean_length"])

    clock, rank = Clock(), options.lora
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM") if rank else None
    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            reward_funcs=names_it,
            args=GRPOConfig(**settings(options, folder)),
            train_dataset=Dataset.from_list(rows_of(options)),
            peft_config=lora,
            callbacks=[clock],
        ).train()
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    num_answers = options.prompts * GROUP
    return [{"seconds": s, "tokens": num_answers * n} for s, n in zip(seconds, clock.lengths, strict=False)]


def refuse_fast_path() -> None:
    """Have models take the general path, as those do that the fast one cannot compute."""
    from covey.policy.models import probe

    def refuse(policy: Any) -> Any:
        raise ValueError("model.name needs the general path, for comparison")

    probe._detect_fast = refuse


def measured(library: str, argv: Sequence[str]) -> dict[str, Any]:
    """Run one library in a process of its own: its steps, and its peak of resident memory."""
    own = {**SPIN, **TUNED_MALLOC} if library == "trl" else {}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.real.beside_trl", *argv, "--worker", library],
        env={**own, **os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{library} ended with {done.returncode}: {done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(library, [round(step["seconds"], 1) for step in found["steps"]], flush=True)
    return found


def row(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Means with their ranges over all steps but those of the warm-up, and how many times TRL's speed."""
    out: dict[str, Any] = {}
    for library, runs in found.items():
        steps = [step for run in runs for step in run["steps"][WARM_UP[library] :]]
        seconds = [step["seconds"] for step in steps]
        out[library] = {
            "seconds": [statistics.fmean(seconds), min(seconds), max(seconds)],
            "tokens_per_second": sum(step["tokens"] for step in steps) / sum(seconds),
            "tokens": statistics.fmean(step["tokens"] for step in steps),
            "peak_gb": max(run["peak_bytes"] for run in runs) / 1e9,
        }
    out["times_in_steps"] = out["trl"]["seconds"][0] / out["covey"]["seconds"][0]
    out["times_in_tokens"] = out["covey"]["tokens_per_second"] / out["trl"]["tokens_per_second"]
    return out


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
    parser.add_argument("--rows", type=Path, help="word problems, a line each (default: things)")
    parser.add_argument("--prompts", type=int, default=8, help="of a step, with 8 answers each")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=64, help="answers of one pass, TRL's best")
    parser.add_argument("--steps", type=int, default=4, help="of TRL; covey takes nine")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each library, by turns")
    parser.add_argument("--general", action="store_true", help="measure covey's general path, too")
    parser.add_argument("--worker", choices=tuple(WARM_UP), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.worker:
        steps = train(options.worker, options)
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"steps": steps, "peak_bytes": peak}))
        return 0
    libraries = (*LIBRARIES, "general") if options.general else LIBRARIES
    found: dict[str, list[Any]] = {library: [] for library in libraries}
    for _ in range(options.rounds):
        for library in libraries:
            found[library].append(measured(library, argv))
    weights = f"rank {options.lora}" if options.lora else "all weights"
    load = f"{options.prompts} x {GROUP} x {options.max_tokens}"
    name = f"beside TRL, {Path(options.model).name}, {options.precision}, {weights}, {load}"
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    results[name] = {**row(found), "machine": machine()}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(name, json.dumps(results[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
