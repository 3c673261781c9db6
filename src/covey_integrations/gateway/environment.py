"""Rows, reward functions, and an agent program that plays every attempt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from covey.environments.base import Split, own_containers
from covey.environments.episode import Episode
from covey.environments.reward_functions.call import problem_with
from covey.environments.reward_functions.environment import Conversation, RewardFunctions
from covey.system.lookup import resolve
from covey.types import Failure, Message, Prompt, Reward
from covey_integrations.gateway.episode import AgentEpisode, Agents, Outcome
from covey_integrations.gateway.program import Command, Function, Program
from covey_integrations.gateway.server import Gateway
from covey_integrations.gateway.wire import RunSampling
from covey_integrations.settings import AgentConfig
from covey_integrations.tools.calls import HERMES, hermes, reader_for, reader_name
from covey_integrations.tools.environment import Judged

MAX_TURNS = 16
"""Calls of a program in an episode, where environment.max_turns is not set."""
OWN = "program"
"""Names the program's own part of a reward."""


class AgentEnvironment(Judged):
    """Prompts are rows; programs' rewards are added to the reward functions'."""

    judged: RewardFunctions

    def __init__(
        self, judged: RewardFunctions, program: Program, run: RunSampling, *, has_rewards: bool = True
    ) -> None:
        super().__init__(judged)
        self._agents = Agents(program, Gateway(run), hermes)
        self._has_rewards = has_rewards
        self._reader = HERMES

    def prompts(self, split: Split) -> list[Prompt]:
        return [replace(prompt, environment="agent") for prompt in self.judged.prompts(split)]

    def read_with(self, tokenizer: Any) -> None:
        self._agents.read = reader_for(tokenizer)
        self._reader = reader_name(tokenizer)

    def max_turns(self, prompt: Prompt) -> int:
        return MAX_TURNS

    def episode(self, prompt: Prompt, seed: int) -> Episode:
        asked = prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]
        row = own_containers({"prompt": asked, **prompt.columns, "seed": seed})
        return AgentEpisode(self._agents, row, lambda outcome: self._verdict(prompt, outcome))

    async def _verdict(self, prompt: Prompt, outcome: Outcome) -> Reward | Failure:
        own = outcome.reward
        if own is None and not self._has_rewards:
            if outcome.is_cut:
                return Reward(0.0, {OWN: 0.0})
            name = self._agents.program.name
            return Failure(f"nothing rewards: set rewards, or let {name} return a reward or post it to /reward")
        if own is not None and (problem := problem_with(own)):
            return Failure(f"the program {self._agents.program.name} gave {problem}")
        found: Reward | Failure = Reward(0.0)
        if self._has_rewards:
            said: list[Message] = outcome.messages or [{"role": "assistant", "content": ""}]
            asked = prompt.text if isinstance(prompt.text, str) else outcome.opening or prompt.text
            (found,) = await self.judged.score_conversations(prompt, [Conversation(asked, said, outcome.token_ids)])
        if own is None or (isinstance(found, Failure) and found.is_fault):
            return found
        base = found if isinstance(found, Reward) else Reward(0.0)
        return replace(base, value=base.value + float(own), parts={**base.parts, OWN: float(own)})

    @property
    def part_weights(self) -> Mapping[str, float]:
        return {**(self.judged.part_weights if self._has_rewards else {}), OWN: 1.0}

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "tool_calls_read_by": self._reader}

    def close(self) -> None:
        self._agents.gateway.close()
        super().close()


def agent_environment(
    settings: AgentConfig, judged: RewardFunctions, sampling: Any, *, has_rewards: bool
) -> AgentEnvironment:
    """Build it of its settings and of `sampling`, which calls must not change."""
    program = Command(settings.command) if settings.program is None else Function(resolve(settings.program, {}))
    run = run_sampling(sampling, settings.max_context, settings.program_sampling)
    return AgentEnvironment(judged, program, run, has_rewards=has_rewards)


def run_sampling(sampling: Any, max_context: int | None, program_sampling: str) -> RunSampling:
    """Return the run's sampling settings, for calls that may not change them."""
    own = {name: vars(sampling)[name] for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")}
    return RunSampling(**own, max_model_len=max_context, overrides=program_sampling == "override")
