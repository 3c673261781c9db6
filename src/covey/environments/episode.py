"""Define episodes: attempts at a prompt of several turns."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from covey.types import Failure, FinishReason, Message, Reward, StopReason

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy's turn.

    >>> Answer("17", (5, 11, 2), "stop", turn=1, conversation=({"role": "user", "content": "?"}, ...))
    """

    text: str
    """Decoded without special tokens."""
    token_ids: tuple[int, ...]
    """Sampled tokens, the stop token included where there was one."""
    finish_reason: FinishReason
    turn: int
    """1 for the policy's first turn."""
    conversation: Sequence[Message]
    """Conversation from its first message to this answer."""
    is_last: bool = False
    """Whether no turn may follow: `environment.max_turns` is reached."""
    marked: str = ""
    """Decoded with special tokens, in which many models write their tool calls."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens that the policy read before it."""
    logprobs: tuple[float, ...] = ()
    """Log-prob of each token, as it was sampled."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's reply to a turn, with its reward.

    >>> Observation("<", reward=0.1)
    >>> Observation(({"role": "tool", "name": "add", "content": "48"},))
    """

    messages: str | tuple[Message, ...] = ()
    """Text for the policy to continue, or messages for the chat template. Text in a conversation of messages is the
    user's next message. Empty where the episode is done, or the policy continues."""
    reward: float | None = None
    """Reward for the turn just taken; None is 0. The verdict on the whole episode (`Episode.score`) comes on top."""
    done: bool = False
    """Whether the episode ends here. Its messages are then for the record alone."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Notes on the turn just taken for rollouts.jsonl: plain data."""
    stop_reason: StopReason | None = None
    """Reason why it is done, where `completed` says too little."""
    state: str | None = None
    """Names the state in which the next turn begins; None takes the whole conversation so far for it."""
    is_void: bool = False
    """Whether the turn just taken held neither a tool call nor an answer."""
    conversation: tuple[Message, ...] | None = None
    """Replaces the whole conversation instead of `messages`: from `reset` it is the prompt, from `reply` a rewritten
    history, with which a branch begins. Its text cannot form marks of the chat template."""
    token_ids: tuple[int, ...] | None = None
    """The policy's next input instead of text, for programs that write prompts. Tokens that do not begin with those so
    far begin a branch."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Tools from `reset`: JSON schemas that are shown in place of the environment's own."""
    max_tokens: int | None = None
    """Bounds the next turn below sampling.max_tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings of the next turn, besides the run's."""

    def __post_init__(self) -> None:
        """Refuse impossible bounds here, where only the attempt fails."""
        if self.max_tokens is not None and not (isinstance(self.max_tokens, int) and self.max_tokens >= 1):
            raise ValueError(f"Observation.max_tokens must be an integer >= 1, got {self.max_tokens!r:.60}")
        are_texts = isinstance(self.stop, list | tuple) and all(isinstance(text, str) for text in self.stop)
        if not are_texts or "" in self.stop:
            raise ValueError(f"Observation.stop must be a tuple of texts that are not empty, got {self.stop!r:.60}")


class Episode(ABC):
    """One attempt at a prompt; a group has one per sample.

    A *tool's* error message is an observation, which the policy must learn from. A *system's* failure (a dead server, a
    deadline that passed) is an exception: the attempt becomes a Failure, never a reward. Its methods may be a plain
    `def` too.
    """

    is_program: bool = False
    """Whether a program leads the conversation: messages that the chat template refuses fail this attempt alone."""
    hears_cuts: bool = False
    """Whether `reply` also gets truncated turns; else the episode ends there."""

    async def reset(self) -> Observation:
        """Begin; messages extend the prompt, text its end."""
        return Observation()

    @abstractmethod
    async def reply(self, answer: Answer) -> Observation:
        """Return the environment's reply to an answer."""

    async def score(self, conversation: Sequence[Message]) -> Reward | Failure | None:
        """Judge the finished episode; None leaves it to `Environment.score`."""
        return None

    async def close(self) -> None:
        """Release the episode's resources; called once."""
        return


async def maybe_await(said: Awaitable[T]) -> T:
    """Return a method's result, awaited if it is async."""
    return (await said) if inspect.isawaitable(said) else said
