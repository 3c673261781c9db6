"""Environments with tools: functions, an object per attempt, and a score.

class Sums(ToolEnvironment):
    functions = (multiply,)

    def prompts(self, split): ...
    async def score(self, prompt, completions): ...         # the last answers, in which nothing is called
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from covey.environments.base import Environment, Split, close_environment, facts_of, follow, metrics_of, naming
from covey.environments.episode import Observation, maybe_await
from covey.types import Failure, Prompt, Reward
from covey_integrations.tools.calling import Caller, ToolLedger, as_text, in_thread
from covey_integrations.tools.calls import HERMES, reader_for, reader_name
from covey_integrations.tools.episode import Talk, ToolEpisode, ToolRules
from covey_integrations.tools.tool import Tool, named_once, tools_of

MAX_TURNS = 8
"""Turns of an episode with tools, where environment.max_turns is not set."""


class ToolServer(Protocol):
    """Provides tools that are no functions of this process."""

    def tools(self) -> tuple[Sequence[Tool], Callable[[], None]]:
        """Return tools for one attempt, and the end of their session."""


class ToolEnvironment(Environment):
    """Base of environments whose policy calls tools.

    State belongs to one attempt: `state` makes an object whose public methods are tools besides `functions`. These are
    called one after the other, while functions may run at the same time.
    """

    functions: Sequence[Callable[..., Any]] = ()
    """Tools without state, the same in every attempt: plain or async, with type hints and a Google docstring."""
    servers: Sequence[ToolServer] = ()
    """Others who have tools."""
    rules = ToolRules()
    tool_timeout: float = 30.0
    """Seconds of one call."""
    written: Callable[[Any], str] = staticmethod(as_text)
    """Makes text of a tool's result."""
    _ledger: ToolLedger | None = None
    _shown: dict[str, tuple[Tool, ...]] | None = None
    _reader = HERMES

    # ---- what a subclass may say

    def state(self, prompt: Prompt, seed: int) -> Any:
        """Return a new attempt's object, whose public methods are tools, or None."""
        return None

    def shown_state(self, prompt: Prompt) -> Any:
        """Return an object with every attempt's methods, for schemas."""
        return self.state(prompt, 0)

    def kind(self, prompt: Prompt) -> str:
        """Name a prompt's tools: prompts of one kind share them."""
        return ""

    async def opening(self, prompt: Prompt, state: Any) -> Observation:
        """Begin an attempt: text is appended to the prompt."""
        return Observation()

    async def judge(self, prompt: Prompt, talk: Talk) -> Reward | Failure | None:
        """Judge a finished attempt; None leaves it to `score`."""
        return None

    async def release(self, prompt: Prompt, talk: Talk) -> None:
        """Release the object of a finished attempt, unless it is broken."""
        return

    # ---- what a run asks

    def max_turns(self, prompt: Prompt) -> int:
        return MAX_TURNS

    @property
    def ledger(self) -> ToolLedger:
        """Return the counts of calls, made lazily: subclasses may skip `__init__`."""
        if self._ledger is None:
            self._ledger = ToolLedger()
        return self._ledger

    def read_with(self, tokenizer: Any) -> None:
        """Read calls as the policy's model writes them."""
        self.rules = replace(self.rules, read=reader_for(tokenizer))
        self._reader = reader_name(tokenizer)

    def tools(self, prompt: Prompt, state: Any = None) -> tuple[Tool, ...]:
        return tools_of(self.functions, state)

    def shown_tools(self, prompt: Prompt) -> tuple[Tool, ...]:
        """Return a prompt's tools, made once per kind."""
        if self._shown is None:
            self._shown = {}
        kind = self.kind(prompt)
        if kind not in self._shown:
            self._shown[kind] = named_once(self._with_servers(prompt, self.shown_state(prompt))[0])
        return self._shown[kind]

    def tool_schemas(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in self.shown_tools(prompt)]

    def episode(self, prompt: Prompt, seed: int) -> ToolEpisode:
        state = self.state(prompt, seed)
        tools, ends = self._with_servers(prompt, state)
        talk = Talk(state)

        async def closes() -> None:
            await maybe_await(self.release(prompt, talk))
            for end in ends:
                await in_thread(end)

        return ToolEpisode(
            Caller({tool.name: tool for tool in tools}, self.tool_timeout, self.ledger, self.written),
            self.rules,
            talk,
            opening=lambda: self.opening(prompt, state),
            judge=lambda talk: self.judge(prompt, talk),
            closes=closes,
        )

    def _with_servers(self, prompt: Prompt, state: Any) -> tuple[list[Tool], list[Callable[[], None]]]:
        """Return an attempt's tools, servers' included, and the sessions' ends."""
        served = [server.tools() for server in self.servers]
        tools = [*self.tools(prompt, state), *(tool for theirs, _ in served for tool in theirs)]
        return tools, [end for _, end in served]

    def metrics(self) -> Mapping[str, float]:
        return self.ledger.metrics()

    def facts(self) -> Mapping[str, Any]:
        return {"tool_calls_read_by": self._reader}


class Judged(Environment):
    """An environment that delegates prompts and score to another."""

    def __init__(self, judged: Environment) -> None:
        self.judged = judged

    def prompts(self, split: Split) -> list[Prompt]:
        with naming(self.judged, "prompts"):
            return self.judged.prompts(split)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return await maybe_await(self.judged.score(prompt, completions))

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        return await maybe_await(self.judged.score_tokens(prompt, completions, completion_ids))

    def gold(self, prompt: Prompt) -> str | None:
        with naming(self.judged, "gold"):
            return self.judged.gold(prompt)

    def dry_run(self, prompt: Prompt) -> "tuple[Environment, Prompt] | None":
        return self.judged.dry_run(prompt)

    def demonstrations(self, split: Split) -> Any:
        return self.judged.demonstrations(split)

    def difficulty(self, prompt: Prompt) -> float | None:
        with naming(self.judged, "difficulty"):
            return self.judged.difficulty(prompt)

    @property
    def part_weights(self) -> Mapping[str, float]:
        return self.judged.part_weights

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        follow(self.judged, step, max_steps, epoch)

    def metrics(self) -> Mapping[str, float]:
        return metrics_of(self.judged)

    def facts(self) -> Mapping[str, Any]:
        return facts_of(self.judged)

    def watched_by(self, watchdog: Any) -> None:
        self.judged.watched_by(watchdog)

    def close(self) -> None:
        close_environment(self.judged)


class WithTools(Judged, ToolEnvironment):
    """An environment with tools added."""

    def __init__(self, judged: Environment, functions: Sequence[Callable[..., Any]] = ()) -> None:
        super().__init__(judged)
        self.functions = tuple(functions)

    def metrics(self) -> Mapping[str, float]:
        return {**metrics_of(self.judged), **ToolEnvironment.metrics(self)}

    def facts(self) -> Mapping[str, Any]:
        return {**facts_of(self.judged), **ToolEnvironment.facts(self)}
