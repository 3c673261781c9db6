"""Everything a rollout needs: engine, environment, tokenizer, limits."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from covey.engine.base import Engine
from covey.environments.base import Environment, adapt, naming
from covey.system.waits.watchdog import PromptWaits
from covey.types import Prompt


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode, and the form of its history."""

    max_turns: int | None = None
    """Turns of the policy; None is the environment's own number."""
    max_context: int | None = None
    """Tokens of prompt and all turns together; None is the model's limit."""
    turn_timeout: float | None = None
    """Seconds that the environment may take for one reply; None leaves it to timeouts.scoring."""
    history: str = "append"
    """`append` keeps the tokens as sampled, `template` renders the whole conversation for each turn."""

    def room(self, num_tokens: int) -> int:
        """Return the number of tokens that still fit after `num_tokens`."""
        return sys.maxsize if self.max_context is None else self.max_context - num_tokens


@dataclass(frozen=True, slots=True)
class Sampler:
    """Everything a rollout needs."""

    engine: Engine
    environment: Environment
    tokenizer: PreTrainedTokenizerBase
    waits: PromptWaits = field(default_factory=PromptWaits)
    """Pending call of each unfinished prompt."""
    mask_id: int | None = None
    """Token that a masked policy replaces (`Policy.mask_id`)."""
    limits: EpisodeLimits = EpisodeLimits()
    """Limits of episodes; a masked policy has one turn."""
    limits_of_parts: Mapping[str, EpisodeLimits] = field(default_factory=dict)
    """Limits by the name of a part of a mixture."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "environment", adapt(self.environment))

    def limits_for(self, prompt: Prompt) -> EpisodeLimits:
        """Return the limits of a prompt's episodes, every turn counted."""
        limits = self.limits_of_parts.get(prompt.environment, self.limits)
        if limits.max_turns:
            return limits
        with naming(self.environment, "max_turns"):
            return replace(limits, max_turns=self.environment.max_turns(prompt))
