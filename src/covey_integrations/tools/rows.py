"""Tools in TRL's form: functions, and classes with instances per attempt.

    class Shop:
        def reset(self, **row) -> str | None: ...       # what it returns is appended to the last user message
        def buy(self, thing: str) -> str: ...           # every other public method is a tool
        def get_reward(self) -> float: ...              # optional: comes on top of the reward functions

Instances are pooled, made once and reset often, and never used by two attempts at a time.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from covey.environments.base import SPLITS, Environment, Split, own_containers, text_of
from covey.environments.data.rows import as_it_is
from covey.environments.episode import Episode, Observation
from covey.environments.reward_functions.build import RewardEntry, Rows, build_judged
from covey.environments.reward_functions.call import problem_with
from covey.environments.reward_functions.environment import Conversation, DryRun, RewardFunctions, TokenIds
from covey.environments.settings import BuildSettings
from covey.system.lookup import resolve
from covey.types import Failure, Message, Prompt, Reward, RunStopped
from covey_integrations.tools.calling import EpisodeOver
from covey_integrations.tools.environment import WithTools
from covey_integrations.tools.episode import Talk, ToolEpisode, ToolRules
from covey_integrations.tools.mcp import McpServer
from covey_integrations.tools.published import with_calls
from covey_integrations.tools.settings import ToolsConfig
from covey_integrations.tools.tool import Tool, named_once

Factory = Callable[[], Any]
COLUMN = "environment"
"""Column of a row that names its class, where there are several."""
NO_PROMPT = "(reset says what is asked)"
"""Stands in rows without a prompt until the instance has been reset."""


class RowTools(WithTools):
    """Rows, reward functions, tools, and an object for each attempt."""

    judged: RewardFunctions
    brings_tools = False
    """Whether each row has tools of its own, which none can run."""

    def __init__(
        self,
        judged: RewardFunctions,
        functions: Sequence[Callable[..., Any]] = (),
        factories: Factory | Mapping[str, Factory] | None = None,
        *,
        has_rewards: bool = True,
    ) -> None:
        """Keep the parts; a column `environment` chooses among several factories.

        Raises ValueError for a class without `reset`, a row that names none, and where nothing rewards.
        """
        super().__init__(judged, functions)
        self._has_rewards = has_rewards
        self._is_chosen = isinstance(factories, Mapping)
        self._factories: dict[str, Factory] = {}
        if isinstance(factories, Mapping):
            self._factories = dict(factories)
        elif factories is not None:
            self._factories = {"": factories}
        self._pool: defaultdict[str, list[Any]] = defaultdict(list)
        self._check(judged)

    def _check(self, judged: RewardFunctions) -> None:
        """Instantiate each class, and check the names in rows."""
        rewarded = self._has_rewards
        for name, factory in self._factories.items():
            made = factory()
            if not callable(getattr(made, "reset", None)):
                raise ValueError(f"{type(made).__name__} must define reset, as an environment_factory")
            rewarded |= callable(getattr(made, "get_reward", None))
            self._pool[name].append(made)
        if not rewarded:
            raise ValueError("nothing rewards: give reward functions, or a class with get_reward")
        named = [p for split in SPLITS for p in judged.prompts(split)] if self._is_chosen else []
        wrong = next((p for p in named if p.columns.get(COLUMN) not in self._factories), None)
        if wrong is not None:
            there = ", ".join(self._factories)
            raise ValueError(f"{wrong.id} has environment={wrong.columns.get(COLUMN)!r}, which is none of {there}")

    def prompts(self, split: Split) -> list[Prompt]:
        return [_emptied(prompt) for prompt in self.judged.prompts(split)]

    def kind(self, prompt: Prompt) -> str:
        return str(prompt.columns[COLUMN]) if self._is_chosen else ""

    def tools(self, prompt: Prompt, state: Any = None) -> tuple[Tool, ...]:
        if not self.brings_tools:
            return super().tools(prompt, state)
        return named_once([Tool(schema["function"]["name"], schema, end_attempt) for schema in prompt.columns["tools"]])

    def tool_schemas(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        return prompt.columns["tools"] if self.brings_tools else super().tool_schemas(prompt)

    def state(self, prompt: Prompt, seed: int) -> Any:
        if not self._factories:
            return None
        kind = self.kind(prompt)
        return self._pool[kind].pop() if self._pool[kind] else self._factories[kind]()

    def shown_state(self, prompt: Prompt) -> Any:
        if not self._factories:
            return None
        kind = self.kind(prompt)
        if not self._pool[kind]:
            self._pool[kind].append(self._factories[kind]())
        return self._pool[kind][-1]

    async def opening(self, prompt: Prompt, state: Any) -> Observation:
        if state is None:
            return Observation()
        asked = prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]
        row = own_containers({"prompt": asked, **prompt.columns})  # for the attempt to change
        if self._is_chosen:
            row.pop(COLUMN)
        what = f"{type(state).__name__}.reset"
        said = await self.ledger.called_in_time(state.reset, what, self.tool_timeout, **row)
        if said is None:
            return Observation()
        return Observation(said if isinstance(said, str) else text_of({"content": said}))

    async def release(self, prompt: Prompt, talk: Talk) -> None:
        if talk.state is not None and not talk.is_broken:
            self._pool[self.kind(prompt)].append(talk.state)

    def close(self) -> None:
        for server in self.servers:
            if isinstance(server, McpServer):
                server.close()
        super().close()

    def judges_groups(self, prompt: Prompt) -> bool:
        """Functions are called once per group, as TRL does, and may compare."""
        return self._has_rewards

    async def score_group(
        self, prompt: Prompt, episodes: Sequence[Episode], conversations: Sequence[Sequence[Message]]
    ) -> list[Reward | Failure]:
        talks = [episode.talk for episode in episodes if isinstance(episode, ToolEpisode)]
        found = await self.judged.score_conversations(prompt, [self._said(prompt, talk) for talk in talks])
        sums = (self._sum(talk, verdict) for talk, verdict in zip(talks, found, strict=True))
        return list(await asyncio.gather(*sums))

    async def judge(self, prompt: Prompt, talk: Talk, *, counts: bool = True) -> Reward | Failure:
        found: Reward | Failure = Failure("no reward function applied", is_fault=False)
        if self._has_rewards:
            said = [self._said(prompt, talk)]
            (found,) = await self.judged.score_conversations(prompt, said, counts=counts)
        return await self._with_own(talk, found)

    def _said(self, prompt: Prompt, talk: Talk) -> Conversation:
        said = talk.messages or [{"role": "assistant", "content": ""}]  # there was no room for a turn
        return Conversation(_after_reset(prompt.text, talk.opening), said, talk.token_ids, talk.state)

    async def _sum(self, talk: Talk, found: Reward | Failure) -> Reward | Failure:
        """Add the attempt object's reward; its failure is this attempt's alone."""
        try:
            return await self._with_own(talk, found)
        except RunStopped:
            raise
        except (Exception, SystemExit) as error:  # foreign code
            talk.is_broken = True
            return Failure(f"{type(talk.state).__name__}.get_reward raised {type(error).__name__}: {error}")

    async def _with_own(self, talk: Talk, found: Reward | Failure) -> Reward | Failure:
        """Add the attempt object's own reward to a verdict."""
        own = getattr(talk.state, "get_reward", None)
        if own is None or (isinstance(found, Failure) and found.is_fault):
            return found
        name = type(talk.state).__name__
        value = await self.ledger.called_in_time(own, f"{name}.get_reward", self.tool_timeout)
        if value is None:
            return found
        problem = problem_with(value)
        if problem:
            return Failure(f"{name}.get_reward returned {problem}")
        base = found if isinstance(found, Reward) else Reward(0.0)
        return replace(base, value=base.value + float(value), parts={**base.parts, name: float(value)})

    def dry_run(self, prompt: Prompt) -> tuple[Environment, Prompt]:
        """Judge answers as single-turn attempts, without counting or logging."""

        async def alone(asked: Prompt, text: str, token_ids: Sequence[int]) -> Reward | Failure:
            talk = Talk(self.state(asked, 0), [{"role": "assistant", "content": text}], list(token_ids))
            talk.opening = await self.opening(asked, talk.state)
            found = await self.judge(asked, talk, counts=False)
            await self.release(asked, talk)
            return found

        async def judge(asked: Prompt, completions: Sequence[str], ids: TokenIds | None) -> list[Reward | Failure]:
            pairs = zip(completions, ids or [()] * len(completions), strict=True)
            return [await alone(asked, text, token_ids) for text, token_ids in pairs]

        return DryRun(self, judge), prompt

    @property
    def part_weights(self) -> Mapping[str, float]:
        owners = [type(made).__name__ for pool in self._pool.values() for made in pool if hasattr(made, "get_reward")]
        return {**(self.judged.part_weights if self._has_rewards else {}), **dict.fromkeys(owners, 1.0)}


def end_attempt(**arguments: Any) -> None:
    """Stand for a tool that only its row knows."""
    raise EpisodeOver("the tools of rows are not run")


def with_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row, with a placeholder prompt if it has none."""
    asked = [{"role": "user", "content": NO_PROMPT}]
    return row if row.get("prompt") is not None else {**row, "prompt": asked}


def _emptied(prompt: Prompt) -> Prompt:
    """Return the prompt without a placeholder's text."""
    if isinstance(prompt.text, str) or text_of(prompt.text[-1]) != NO_PROMPT:
        return prompt
    return replace(prompt, text=(*prompt.text[:-1], {**prompt.text[-1], "content": ""}))


def _after_reset(text: str | tuple[Message, ...], opening: Observation) -> str | tuple[Message, ...]:
    """Return a prompt with the text that `reset` appended."""
    said = opening.messages
    if not isinstance(said, str) or not said:
        return text
    if isinstance(text, str):
        return text + said
    if text[-1]["role"] != "user":
        return (*text, {"role": "user", "content": said})
    return (*text[:-1], {**text[-1], "content": text_of(text[-1]) + said})


def build_tools(
    settings: ToolsConfig,
    run: BuildSettings,
    rewards: Sequence[RewardEntry] | None = None,
    rows_in_memory: Rows | None = None,
    given: Sequence[Callable[..., Any]] | None = None,
) -> RowTools:
    """Build it from settings, or from a program's functions, class and rows."""
    if given is None:
        functions = [resolve(name, {}) for name in settings.tools]
        toolset = None if settings.toolset is None else resolve(settings.toolset, {})
    else:
        functions = [tool for tool in given if not isinstance(tool, type)]
        toolset = next((tool for tool in given if isinstance(tool, type)), None)
    brings = not functions and toolset is None and not settings.servers
    opened = partial(with_calls, column=run.data.prompt_column) if brings else as_it_is
    judged = build_judged(settings, run, rewards, rows_in_memory, opened)
    made = RowTools(judged, functions, toolset, has_rewards=bool(run.rewards))
    made.brings_tools = brings
    # The first turn that calls is judged, for nothing can run the tools of rows
    made.rules = ToolRules(max_calls=0 if brings else settings.max_tool_calls, role=settings.tool_role)
    made.tool_timeout = settings.tool_timeout
    shared = settings.server_sessions == "shared"
    made.servers = [McpServer(server, is_shared=shared, seconds=settings.tool_timeout) for server in settings.servers]
    return made
