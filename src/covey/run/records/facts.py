"""Facts of a run that its checkpoints and its summary hold."""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from covey.environments.base import facts_of
from covey.policy.models.made import code_hashes
from covey.run.build import Run
from covey.run.evaluate import evaluation_from
from covey.run.trust import named_code
from covey.run.versions import versions
from covey.system import collectives
from covey.system.custom import source_hashes
from covey.system.lookup import attribute
from covey.system.text.masking import mask

TELLS_NOTHING = ("model.code", "data.", "output.")
"""Settings whose functions are known by what they make: the model's code, the prompts; and callbacks."""


def environment_facts(run: Run) -> Mapping[str, Any]:
    """Return the environment's facts, such as the isolation of programs."""
    return mask(facts_of(run.environment))


def code_of(run: Run, given: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return hashes of the user's code, as `Run.code` has them."""
    named = {}
    for key, name in named_code(asdict(run.config)):
        module, _, function = name.partition(":")
        if module in sys.modules and not key.startswith(TELLS_NOTHING):
            found = attribute(sys.modules[module], function.partition(".")[0], sys.modules[module])
            named[f"{key.removesuffix('.function')} {name}"] = source_hashes([found], [module])
    own = {name: source_hashes([part]) for name, part in given.items()}
    every = {"model": code_hashes(run.policy.causal_lm)} | named | own
    return {name: files for name, files in every.items() if files}


def changed_code(then: Any, now: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the changed files of the user's code."""
    had = then if isinstance(then, dict) else {}
    both = [(name, had[name], files) for name, files in now.items() if isinstance(had.get(name), dict)]
    found = {name: [file for file, one in files.items() if old.get(file, one) != one] for name, old, files in both}
    return {name: files for name, files in found.items() if files}


def manifest_facts(run: Run, prompts: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's facts of the run; `prompts` is their fingerprint."""
    facts: dict[str, Any] = {"versions": versions(), "num_ranks": collectives.world_size()}
    facts |= {"environment": environment_facts(run), "prompts": prompts}
    code = dict(run.code)
    facts |= {name: found for name, found in (("code", code.pop("model", {})), ("user_code", code)) if found}
    facts |= {"reference": run.reference_identity} if run.reference_identity else {}
    facts |= {"num_threads": torch.get_num_threads()} if run.policy.device.type == "cpu" else {}
    # From the saved state: a stop may have come before that of the newest evaluation was taken
    if state["record"]["evaluated_at"] == state["step"]:
        score = evaluation_from(state["record"]["evaluations"][-1]).score
        facts["score"] = -1e30 if math.isnan(score) else score  # JSON has no NaN, and any score is better
    return facts
