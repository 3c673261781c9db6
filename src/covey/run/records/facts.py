"""Facts of a run that its checkpoints and its summary hold."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from covey.environments.base import facts_of
from covey.policy.models.made import code_hashes
from covey.run.build import Run
from covey.run.evaluate import evaluation_from
from covey.run.versions import versions
from covey.system import collectives
from covey.system.text.masking import mask


def environment_facts(run: Run) -> Mapping[str, Any]:
    """Return the environment's facts, such as the isolation of programs."""
    return mask(facts_of(run.environment))


def manifest_facts(run: Run, prompts: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's facts of the run; `prompts` is their fingerprint."""
    facts: dict[str, Any] = {"versions": versions(), "num_ranks": collectives.world_size()}
    facts |= {"environment": environment_facts(run), "prompts": prompts}
    facts |= {"code": code} if (code := code_hashes(run.policy.causal_lm)) else {}
    facts |= {"reference": run.reference_identity} if run.reference_identity else {}
    facts |= {"num_threads": torch.get_num_threads()} if run.policy.device.type == "cpu" else {}
    # From the saved state: a stop may have come before that of the newest evaluation was taken
    if state["record"]["evaluated_at"] == state["step"]:
        score = evaluation_from(state["record"]["evaluations"][-1]).score
        facts["score"] = -1e30 if math.isnan(score) else score  # JSON has no NaN, and any score is better
    return facts
