"""A program's objects in place of settings."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from covey.config.schema import Config
from covey.environments.base import Environment
from covey.policy.models.loading import policy_in_memory
from covey.policy.models.reference_model import NO_MODELS, FrozenModels
from covey.policy.policy import Policy
from covey.run.build import Run, build_environment, checked_environment
from covey.run.records.callbacks import Callback
from covey.run.records.record import RunRecorder

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunObjects:
    """The objects a program gave a run; a resume needs them again."""

    model: nn.Module | None = None
    """Trained in place; None loads the model of `model.name`."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Tokenizer of the model in memory."""
    environment: Callable[[Config], Environment] | None = None
    """Makes the environment, each time that one is needed; None builds that of `environment.name`."""
    compared: FrozenModels = NO_MODELS
    """Models that `algorithm.reference_model` and `algorithm.teacher` stand for; copies of them are frozen."""
    code: Mapping[str, Any] = field(default_factory=dict)
    """Its functions and environment that no module has, by setting and name."""
    callbacks: Sequence[Callback] = ()
    built: Callable[[Run, RunRecorder], None] = lambda run, record: None
    """Called on every process with the parts of the run, once they are wired."""

    def build_environment(self, config: Config, say: Callable[[str], None] = LOGGER.info) -> Environment:
        """Build the environment, or take the program's. ValueError."""
        if self.environment is None:
            return build_environment(config, say)
        return checked_environment(config, self.environment(config))

    def policy(self, config: Config) -> Policy | None:
        """Return the in-memory model's policy, None without one."""
        if self.model is None:
            return None
        assert self.tokenizer is not None, "a model in memory comes with its tokenizer"
        return policy_in_memory(self.model, self.tokenizer, config.model, seed=config.seed)


NO_OBJECTS = RunObjects()
"""Objects of a run that its settings describe in full."""
