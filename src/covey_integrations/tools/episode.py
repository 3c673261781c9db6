"""An episode of tool calls that ends with a turn without any."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from covey.environments.episode import Answer, Episode, Observation, maybe_await
from covey.types import CutText, Failure, Message, Reward
from covey_integrations.tools.calling import Caller, ToolAnswer, tool_message
from covey_integrations.tools.calls import BadCall, Reader, Said, hermes

T = TypeVar("T")


@dataclass
class Talk:
    """The messages of an attempt, and its object."""

    state: Any = None
    messages: list[Message] = field(default_factory=list)
    """Answers with their `tool_calls`, and tool results that the policy has read."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens that the policy sampled, over all turns."""
    opening: Observation = field(default_factory=Observation)
    """Messages before its first turn."""
    is_broken: bool = False
    """Whether a call was given up: the state may still be in use, by a thread that was left behind."""


@dataclass(frozen=True)
class ToolRules:
    """Rules of tool calls in an episode, and of their answers."""

    read: Reader = hermes
    max_calls: int | None = None
    """Calls of an episode (environment.max_tool_calls); a turn that asks for more ends it."""
    role: str = "tool"
    """Role of a tool's answer: `tool`, or `user` for templates that know no tools."""
    calls_last: bool = True
    """Whether calls of the last turn are made, though no turn reads their results."""


@dataclass(eq=False)
class ToolEpisode(Episode):
    """Answers calls of tools, until a turn has none.

    A tool's answer is a message with its name. Unreadable calls, unknown tools and wrong arguments are answered with
    the error.
    """

    hears_cuts = True

    caller: Caller
    rules: ToolRules
    talk: Talk
    opening: Callable[[], Awaitable[Observation]]
    """Begins the attempt."""
    judge: Callable[[Talk], Awaitable[Reward | Failure | None]]
    closes: Callable[[], Awaitable[None]]
    """Releases the attempt's resources."""
    _num_calls: int = 0
    _unread: tuple[Message, ...] = ()

    async def reset(self) -> Observation:
        self.talk.opening = await self._whole(self.opening)
        return self.talk.opening

    async def reply(self, answer: Answer) -> Observation:
        # A tool's message that no turn reads would be judged as the answer
        self.talk.messages += self._unread
        self.talk.token_ids += answer.token_ids
        # A turn that was cut is no answer
        if answer.finish_reason == "length":
            self.talk.messages.append({**answer.conversation[-1], "content": CutText(answer.text)})
            return Observation(done=True)
        said = self.rules.read(answer, [tool.schema for tool in self.caller.tools.values()])
        self.talk.messages.append(said.message)
        self._num_calls += len(said.calls)
        if not said.calls:
            return Observation(done=True, is_void=not said.text.strip(), info=_counts(said, ()))
        if self.rules.max_calls is not None and self._num_calls > self.rules.max_calls:
            return Observation(done=True, stop_reason="max_tool_calls", info=_counts(said, ()))
        if answer.is_last and not self.rules.calls_last:
            return Observation(done=True, stop_reason="max_turns", info=_counts(said, ()))
        answers = await self._whole(lambda: self.caller.answers(said.calls))
        self._unread = messages = self._messages(answers, answer.turn)
        ends = any(found.ends for found in answers)
        if ends:
            self.talk.messages += messages
        return Observation(
            messages,
            done=ends,
            info=_counts(said, answers),
            stop_reason="tool_stopped" if ends else None,
            is_void=all(isinstance(call, BadCall) for call in said.calls),
        )

    async def score(self, conversation: Sequence[Message]) -> Reward | Failure | None:
        return await self._whole(lambda: self.judge(self.talk))

    async def close(self) -> None:
        await self.closes()

    async def _whole(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await a call, and record an incomplete one."""
        try:
            return await maybe_await(call())
        except BaseException:
            self.talk.is_broken = True
            raise

    def _messages(self, answers: Sequence[ToolAnswer], turn: int) -> tuple[Message, ...]:
        """Return tools' answers; as the user's they are one message."""
        if self.rules.role != "tool":
            return ({"role": self.rules.role, "content": "\n".join(answer.content for answer in answers)},)
        return tuple(tool_message(found.name, found.content, turn, place) for place, found in enumerate(answers))


def _counts(said: Said, answers: Sequence[ToolAnswer]) -> dict[str, float]:
    """Return numbers to log, means over turns."""
    return {
        "tool_calls": float(len(said.calls)),
        "tool_errors": float(sum(answer.is_error for answer in answers)),
        "parse_errors": float(sum(isinstance(call, BadCall) for call in said.calls)),
    }
