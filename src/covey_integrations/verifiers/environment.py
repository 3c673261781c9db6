"""Environments of verifiers as covey's own: a worker plays them, by calling the policy through the gateway."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.environments.base import Split
from covey.environments.reward_functions.build import no_reward
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.types import Message, Prompt
from covey_integrations.gateway.environment import AgentEnvironment
from covey_integrations.gateway.wire import RunSampling
from covey_integrations.verifiers.process import WorkerProgram

LOGGER = logging.getLogger(__name__)


class Verifiers(AgentEnvironment):
    """Its tasks are the prompts, and its own rewards are the reward."""

    def __init__(self, worker: WorkerProgram, run: RunSampling) -> None:
        """Load the environment. Raises ValueError, with the setting, where that fails."""
        self._worker = worker
        try:
            self._kind, asked = worker.load()
            judged = RewardFunctions(
                rows_of(asked, worker.name), reward_functions([no_reward]), RewardSettings(in_process=True)
            )
        except ValueError:
            worker.close()
            raise
        super().__init__(judged, worker, run, has_rewards=False)

    def prompts(self, split: Split) -> list[Prompt]:
        return [replace(prompt, environment="verifiers") for prompt in self.judged.prompts(split)]

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "verifiers_api": self._kind}

    def close(self) -> None:
        super().close()
        self._worker.close()


def rows_of(asked: Mapping[str, Sequence[Any]], name: str) -> dict[Split, list[dict[str, Any]]]:
    """Return a row for each task, which names it. Tasks for tests that are trained on too are left out.

    Raises ValueError where nothing is left of a split.
    """
    known = {json.dumps(prompt) for prompt in asked["train"]}
    rows: dict[Split, list[dict[str, Any]]] = {"train": [], "test": []}
    for split, found in rows.items():
        for index, prompt in enumerate(asked[split]):
            if split == "train" or json.dumps(prompt) not in known:
                found.append({"prompt": _messages(prompt), "split": split, "index": index})
        if not found:
            raise ValueError(f"environment.id={name} has no tasks of its own for split {split}")
    left_out = len(asked["test"]) - len(rows["test"])
    if left_out:
        LOGGER.warning("%d tasks of split test left out because split train has their prompts too", left_out)
    return rows


def _messages(prompt: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(said) for said in prompt]
