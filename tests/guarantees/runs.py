"""Small runs of the real command, for tests that kill, stop and resume them."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from covey.checkpoint import STATE

REWARDS = """
def digits(prompts, completions, **columns):
    return [sum(c in "0123456789" for c in text) / (1 + len(text)) for text in completions]
"""
SETTINGS = (
    "environment=reward_functions",
    "rewards=[digits_reward:digits]",
    "environment.in_process=true",
    "model.nano_hidden_size=16",
    "model.nano_num_layers=1",
    "model.nano_num_heads=2",
    "num_steps=8",
    "groups_per_step=2",
    "group_size=4",
    "sampling.max_tokens=6",
    "optimizer.lr=1e-2",
    "evaluation.every=3",
    "evaluation.num_prompts=2",
    "evaluation.num_samples=2",
    "evaluation.k=[1]",
    "output.save_every=2",
    "output.keep_last=2",
    "output.progress=false",
)
TIMES = ("seconds", "tokens_per_second")


def prepare(folder: Path) -> None:
    """The rows and the reward that the runs in `folder` use."""
    (folder / "digits_reward.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"number {n}: "}) for n in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """`covey train` in a process of its own, in `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "COVEY_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "covey", "train", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def new_run(folder: Path, name: str, *words: str) -> "subprocess.Popen[str]":
    return start(folder, *SETTINGS, "data.path=rows.jsonl", f"hydra.run.dir={name}", *words)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit status and output; a process that does not end within two minutes fails the test."""
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def wait_for(path: Path, process: "subprocess.Popen[str]", deadline: float = 60.0) -> None:
    """Until the path exists."""
    until = time.monotonic() + deadline
    while not path.exists():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.01)


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def fingerprint(run: Path) -> str:
    """SHA-256 of the final weights, of the optimiser's state and of the metrics without times."""
    last = sorted((run / "checkpoints").glob("step-??????"))[-1]
    digest = hashlib.sha256(last.name.encode())
    digest.update((last / "policy" / "model.safetensors").read_bytes())
    state = torch.load(last / STATE, weights_only=True)
    for moments in state["trainer"]["optimizer"]["state"].values():
        for name in sorted(moments):
            digest.update(moments[name].numpy().tobytes())
    digest.update(json.dumps([state["source"], state["credit"]]).encode())
    digest.update(json.dumps(rows(run)).encode())
    return digest.hexdigest()


def rows(run: Path) -> list[dict[str, object]]:
    """The rows of metrics.jsonl, without times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
