"""The complete state of a run, in one list.

weights or adapter    policy/ of the checkpoint
trainer               optimiser, loss scale, KL coefficient, entropy bonus, refreshed reference, count of bad steps
source                position in the prompt stream, finished groups (one in flight is sampled again), the curriculum
credit                running baselines
record                counters, earlier evaluations, seconds of each phase
generators            Python, NumPy, torch CPU and its own GPU of each rank (sampling and data order use none of them)

It is the same for any number of ranks, sharded or not, so a run may resume with another number of them.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from covey.run.build import Run
from covey.run.records.record import RunRecorder
from covey.system import collectives


def snapshot(run: Run, record: RunRecorder, step: int) -> dict[str, Any]:
    """Copy the state after a step, without weights and moments."""
    return {
        "step": step,
        "source": run.source.state_dict(),
        "credit": run.credit.state_dict(),
        "record": record.state_dict(),
        "generators": generators(),
    }


def checkpoint_state(run: Run, light: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state to save with the weights after step `light["step"]`."""
    return {**light, "generators": collectives.all_gather(light["generators"]), "trainer": run.trainer.state_dict()}


def restore(run: Run, record: RunRecorder, state: Mapping[str, Any]) -> int:
    """Load a saved state, without weights; return its step."""
    run.trainer.load_state_dict(state["trainer"])
    run.source.load_state_dict(state["source"])
    run.credit.load_state_dict(state["credit"])
    record.load_state_dict(state["record"])
    of_ranks = state["generators"]
    restore_generators(of_ranks[collectives.rank() % len(of_ranks)])
    return int(state["step"])


def generators() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
    }


def restore_generators(states: Mapping[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and states["cuda"]:
        torch.cuda.set_rng_state(states["cuda"][0])
