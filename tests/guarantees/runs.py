"""Small runs of the real command, for tests that kill, stop, starve and resume them.

The reference run: a policy of a few thousand weights, 40 steps, a checkpoint every 5.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from covey.run.checkpoints.checkpoint import STATE, newest_valid, read_manifest

from ..support.forked import Forked

REWARDS = '''
import os, subprocess, time

CALLS = [0]

def varied(prompts, completions, **columns):
    """Differs between completions. At call STRIKE_AT the run strikes itself with the command of the file `strike`."""
    CALLS[0] += 1
    time.sleep(float(os.environ.get("REWARD_SECONDS", "0")))
    if CALLS[0] == int(os.environ.get("STRIKE_AT", "0")):
        subprocess.run(["bash", "strike"], check=True)
    return [sum(text.encode()) % 5 / 4 for text in completions]

class Talks:
    """Answers each turn after a while, and rewards the last one."""

    def prompts(self, split):
        from covey.types import Prompt
        return [Prompt(f"{split}-{n}", "talks", f"{n}?", {}) for n in range(8)]

    async def reply(self, prompt, messages):
        import asyncio
        said = sum(messages[-1]["content"].encode()) % 7
        await asyncio.sleep(said / 1000)
        return {"role": "user", "content": f"{said}"}

    async def score(self, prompt, completions):
        from covey.types import Reward
        return [Reward(value) for value in varied([], completions)]
'''
NUM_STEPS, SAVE_EVERY, KEEP_LAST = 40, 5, 2
SETTINGS = (
    "environment=reward_functions",
    "rewards=[varied_reward:varied]",
    "environment.in_process=true",
    "data.path=rows.jsonl",
    "model.nano_hidden_size=16",
    "model.nano_num_layers=1",
    "model.nano_num_heads=2",
    f"num_steps={NUM_STEPS}",
    "groups_per_step=2",
    "group_size=4",
    "sampling.max_tokens=6",
    "optimizer.lr=1e-2",
    "evaluation.every=15",
    "evaluation.num_prompts=2",
    "evaluation.num_samples=2",
    "evaluation.k=[1]",
    f"output.save_every={SAVE_EVERY}",
    f"output.keep_last={KEEP_LAST}",
    "output.progress=false",
)
CURRICULUM = (
    *(word for word in SETTINGS if not word.startswith("environment")),
    "environment=mixture",
    "environment.parts={rows: {name: reward_functions, in_process: true}, sums: {name: arithmetic, levels: [1, 2]}}",
    "environment.weights={rows: 3}",
    "curriculum.name=success",
    "evaluation.correct_above=0.5",
    "group_size_schedule=[{step: 20, group_size: 3}]",
)
"""The same with all that decides which prompts come next: environments in turn, success rates, another group size."""
MASKED = (
    *("model=nano-masked", "engine=fill", "algorithm=batch_std_reinforce", "model.nano_architecture=bert"),
    *("data.path=gaps.jsonl", "sampling.temperature=0.8", "sampling.top_p=0.95", "sampling.num_passes=2"),
)
"""What makes the same a run of a policy that fills in, in two passes, with a reference."""
EPISODES = (
    *(word for word in SETTINGS if not word.startswith(("environment", "rewards", "data"))),
    *("environment=custom", "environment.factory=varied_reward:Talks", "environment.max_turns=3"),
    "sampling.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t]",
)
"""The same with three turns, and answers that take their time."""
TIMES = ("time", "seconds", "tokens_per_second")
PATIENCE = 180.0
"""Seconds that a small run may take on a loaded machine."""

Process = subprocess.Popen[str] | Forked


def prepare(folder: Path) -> None:
    """The rows and the reward that the runs in `folder` use."""
    (folder / "varied_reward.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"number {n}: "}) for n in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    gaps = [json.dumps({"prompt": f"<mask>umber {n}<mask><mask>: <mask>"}) for n in range(20)]
    (folder / "gaps.jsonl").write_text("\n".join(gaps) + "\n")


def start(folder: Path, *words: str, environment: dict[str, Any] | None = None, is_fresh: bool = False) -> Process:
    """`covey train` in a process of its own, in `folder`; a group of its own, as a terminal would give it.

    `is_fresh`: of an interpreter of its own, too, which takes seconds to import torch.
    """
    own = {"OMP_NUM_THREADS": "1", "COVEY_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    variables = os.environ | own | {name: str(value) for name, value in (environment or {}).items()}
    if not is_fresh:
        return Forked(["train", *words], folder, variables)
    return subprocess.Popen(
        [sys.executable, "-m", "covey", "train", *words],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def new_run(folder: Path, name: str, *words: str, settings: Sequence[str] = SETTINGS, **options: Any) -> Process:
    return start(folder, *settings, f"hydra.run.dir={name}", *words, **options)


def resume(folder: Path, name: str, *words: str, **options: Any) -> Process:
    return start(folder, f"resume={name}", *words, **options)


def finish(process: Process) -> tuple[int, str]:
    """Exit status and output; a process that does not end in time fails the test."""
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


def finish_well(process: Process) -> str:
    """The output of a run that has to end as it should."""
    status, output = finish(process)
    assert status == 0, output
    return output


def wait_until(condition: Callable[[], object], process: Process) -> bool:
    """Until it holds; False where the process has ended before."""
    until = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < until, "what was waited for never came"
        time.sleep(0.002)
    return True


def kill(process: Process) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def num_trained(run: Path) -> int:
    """Whole rows of training steps in metrics.jsonl."""
    path = run / "metrics.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


def saved_step(run: Path) -> int:
    """Step of the newest checkpoint that verifies, 0 where there is none."""
    found = newest_valid(run / "checkpoints")
    return 0 if found is None else int(read_manifest(found)["step"])


OF_THE_SAMPLER = ("mismatch", "sampler_", "ess_fraction", "update_gain")
"""Metrics of the log-probs that the engine gave: their last bits follow from what was sampled at the same time, which
follows from the clock where tools take theirs. No update reads them unless it corrects for them."""
OF_DRAFTS = ("engine/",)
"""Metrics of what drafts saved."""


def fingerprint(run: Path, leave_out: tuple[str, ...] = ()) -> str:
    """SHA-256 of the final weights, of the optimiser's state, of positions and of the metrics without times.

    `leave_out`: begins of the names of metrics.
    """
    last = sorted((run / "checkpoints").glob("step-??????"))[-1]
    digest = hashlib.sha256(last.name.encode())
    digest.update((last / "policy" / "model.safetensors").read_bytes())
    state = torch.load(last / STATE, weights_only=True)
    for moments in state["trainer"]["optimizer"]["state"].values():
        for name in sorted(moments):
            digest.update(moments[name].numpy().tobytes())
    digest.update(json.dumps([state["source"], state["credit"]]).encode())
    kept = [{k: v for k, v in row.items() if not (leave_out and k.startswith(leave_out))} for row in rows(run)]
    digest.update(json.dumps(kept).encode())
    return digest.hexdigest()


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, or another file of rows, without times."""
    lines = (run / name).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
