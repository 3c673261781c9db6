"""Define environments: prompts, and the worth of completions."""

import json
import logging
import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import getattr_static, iscoroutinefunction
from typing import Any, Literal, Protocol, runtime_checkable

from covey.environments.episode import Answer, Episode, Observation, maybe_await
from covey.system.jsonl import as_lists
from covey.system.lookup import describe, is_coveys
from covey.system.waits.watchdog import Watchdog
from covey.types import Failure, Message, Prompt, Reward, RunStopped

LOGGER = logging.getLogger(__name__)

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
Demonstration = tuple[Prompt, str | Sequence[int] | Sequence[Message]]
"""A prompt and a good completion, as text, as tokens, or as the messages of an episode, the assistant's first. The cold
start adds the end-of-sequence token, but after turns of plain text that end with a stop string."""
DEFAULT_MAX_TURNS = 2
"""Turns of the policy in an episode, where neither the settings nor the environment say another number."""


@runtime_checkable
class EnvironmentLike(Protocol):
    """The two methods of an environment; `adapt` adds the others."""

    def prompts(self, split: Split) -> list[Prompt]: ...

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]: ...


@dataclass(frozen=True, slots=True)
class JudgeSummary:
    """The learned judge whose score is the reward.

    >>> JudgeSummary(is_frozen=True, summary_line="judge ranks 93.0% of held-out texts above their corrupted versions")
    """

    is_frozen: bool
    """True where none of its weights can be trained."""
    summary_line: str
    """Line that says how often it is right."""


class Environment(ABC):
    """Supplies prompts and judges completions; all other methods are optional.

    A *policy's* failure (unparsable answer, endless program) is a low Reward; a *system's* failure (crashed
    simulator, unreachable judge) is a Failure.
    """

    @abstractmethod
    def prompts(self, split: Split) -> list[Prompt]:
        """Return all prompts of a split in fixed order; splits are disjoint."""

    @abstractmethod
    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        """Return one judgement per completion (text without special tokens), in order."""

    # ---- judging

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        """Judge sampled tokens with their text, as a run calls it.

        completion_ids are the tokens of each completion, the stop token included.
        """
        return await maybe_await(self.score(prompt, completions))

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        """Return the next message of a conversation, None at its end.

        After a message the policy has another turn, and the last turn is scored.
        """
        return None

    def episode(self, prompt: Prompt, seed: int) -> Episode | None:
        """Return a new attempt at the prompt, None for a single answer.

        `seed` is the attempt's own, and decides everything it draws. An environment that has `reply` needs no episode.
        """
        return Replies(self, prompt) if self.can_reply else None

    def judges_groups(self, prompt: Prompt) -> bool:
        """Return True if `score_group` replaces `Episode.score` for the prompt."""
        return False

    async def score_group(
        self, prompt: Prompt, episodes: Sequence[Episode], conversations: Sequence[Sequence[Message]]
    ) -> list[Reward | Failure]:
        """Return one judgement per finished episode of a group, in order.

        No episode is closed yet. `conversations` are what was said in each, from its first message.
        """
        raise NotImplementedError(f"{type(self).__name__}.judges_groups needs score_group")

    def max_turns(self, prompt: Prompt) -> int:
        """Return the most turns, unless `environment.max_turns` is set."""
        return DEFAULT_MAX_TURNS

    def tool_schemas(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of tools for the chat template."""
        return ()

    @property
    def can_reply(self) -> bool:
        """Return True if `reply` may continue a conversation."""
        return type(self).reply is not Environment.reply

    def dry_run(self, prompt: Prompt) -> "tuple[Environment, Prompt] | None":
        """Return an environment and prompt to try the user's reward code.

        It judges as in training but counts and logs nothing, and where no judgement applies it gives 0. None where no
        code of the user's judges the prompt.
        """
        return None

    @property
    def part_weights(self) -> Mapping[str, float]:
        """Return the weight of each named part of a weighted sum."""
        return {}

    def judge_summary(self) -> JudgeSummary | None:
        """Describe the learned judge, None without one."""
        return None

    # ---- prompts

    def gold(self, prompt: Prompt) -> str | None:
        """Return a completion with the maximum reward, None if unknown."""
        return None

    def gold_turn(self, prompt: Prompt, conversation: Sequence[Message]) -> str | None:
        """Return a perfect policy's next turn, None if unknown.

        The conversation begins with the prompt's messages.
        """
        return None

    def demonstrations(self, split: Split) -> Sequence[Demonstration]:
        """Return prompts with good completions for a cold start."""
        return ()

    def difficulty(self, prompt: Prompt) -> float | None:
        """Return a prompt's difficulty for a curriculum; equal numbers are one level."""
        return None

    @property
    def sampling_weights(self) -> Mapping[str, float]:
        """Return the relative weights of a mixture's parts, by name."""
        return {}

    # ---- the run around it

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        """Receive the finished steps, their total, and the epochs."""
        return

    def metrics(self) -> Mapping[str, float]:
        """Return metrics since the last call."""
        return {}

    def facts(self) -> Mapping[str, Any]:
        """Return plain facts for a run's record, such as isolation."""
        return {}

    def read_with(self, tokenizer: Any) -> None:
        """Receive the policy's tokenizer, for its form of tool calls."""
        return

    def watched_by(self, watchdog: Watchdog) -> None:
        """Name waits to the run's watchdog."""
        return

    def close(self) -> None:
        """Release resources that would outlive the run."""
        return


class Replies(Episode):
    """Converse by `Environment.reply`, and score the last answer."""

    def __init__(self, environment: Environment, prompt: Prompt) -> None:
        self._environment = environment
        self._prompt = prompt

    async def reply(self, answer: Answer) -> Observation:
        """Return the next message; done without one, or without a turn left."""
        if answer.is_last:
            return Observation(done=True, stop_reason="max_turns")
        try:
            message = await maybe_await(self._environment.reply(self._prompt, answer.conversation))
        except RunStopped:
            raise
        except (Exception, SystemExit) as error:  # foreign code: what there is can still be scored
            told = (self._prompt.id, self._prompt.environment, type(error).__name__, error)
            LOGGER.warning("prompt %s: %s.reply: %s: %s", *told)
            return Observation(done=True, stop_reason="failure")
        return Observation(done=True) if message is None else Observation((message,))


def adapt(environment: EnvironmentLike) -> Environment:
    """Return an object as an `Environment`, with defaults for missing methods.

    An `Environment` is returned as it is. Methods may be a plain `def` where this class has `async def` (see
    `maybe_await`). ValueError where something else has a method's name. No property is evaluated.
    """
    if isinstance(environment, _Adapted):
        return environment
    hooks = {name: hook for name, hook in vars(Environment).items() if not name.startswith("_")}
    # An attribute that happens to be called so would break the run where it is first called
    own = {name: found for name in hooks if (found := _attribute(environment, name)) is not None}
    for name, found in own.items():
        hook, is_method = hooks[name], not isinstance(hooks[name], property)
        if callable(found) != is_method:
            due = "a method" if is_method else "a property"
            raise ValueError(f"{type(environment).__name__}.{name} must be {due}, got a {type(found).__name__}")
        if iscoroutinefunction(found) and not iscoroutinefunction(hook):
            raise ValueError(f"{type(environment).__name__}.{name} must be a plain def, got an async def")
    if isinstance(environment, Environment):
        return environment
    forwarded = {name: _forward(name) for name in own}
    return type(type(environment).__name__, (_Adapted,), forwarded)(environment)


def _attribute(environment: EnvironmentLike, name: str) -> Any:
    """Return an attribute or None, without evaluating properties."""
    found = getattr_static(environment, name, None)
    return found if isinstance(found, property | cached_property) else getattr(environment, name, None)


class EnvironmentFault(ValueError):
    """A method of an environment raised or returned something wrong."""


def naming(environment: Environment, method: str) -> AbstractContextManager[None]:
    """Raise EnvironmentFault with environment, method and place, as `faults_of`."""
    return faults_of(f"{type(environment).__name__}.{method}")


@contextmanager
def faults_of(name: str) -> Iterator[None]:
    """Raise EnvironmentFault with name and place for foreign errors.

    Stops on purpose pass. A delegating environment leaves the fault to the inner one. covey's own assertions keep their
    traceback.
    """
    try:
        yield
    except (RunStopped, MemoryError, EnvironmentFault):
        raise
    except (Exception, SystemExit) as error:  # foreign code
        if isinstance(error, AssertionError) and is_coveys(error):
            raise
        raise EnvironmentFault(f"{name} {describe(error)}") from error


def follow(environment: Environment, step: int, max_steps: int, epoch: float) -> None:
    with naming(environment, "follow"):
        environment.follow(step, max_steps, epoch)


def metrics_of(environment: Environment) -> dict[str, float]:
    """Return an environment's metrics as floats. EnvironmentFault for others."""
    with naming(environment, "metrics"):
        found: object = environment.metrics()
    name = type(environment).__name__
    if not isinstance(found, Mapping):
        raise EnvironmentFault(f"{name}.metrics must return numbers by name, got a {type(found).__name__}")
    plain = {str(key): as_lists(value) for key, value in found.items()}
    measured = {key: value for key, value in plain.items() if value is not None}
    wrong = next((key for key, value in measured.items() if not isinstance(value, numbers.Real)), None)
    if wrong is not None:
        raise EnvironmentFault(f"{name}.metrics must return numbers by name, got {wrong}={measured[wrong]!r:.60}")
    return {key: float(value) for key, value in measured.items()}


def facts_of(environment: Environment) -> dict[str, Any]:
    """Return an environment's facts as JSON data. EnvironmentFault."""
    with naming(environment, "facts"):
        found: object = environment.facts()
    due = f"{type(environment).__name__}.facts must return plain values by name"
    if not isinstance(found, Mapping):
        raise EnvironmentFault(f"{due}, got a {type(found).__name__}")
    facts: dict[str, Any] = {}
    for name, value in found.items():
        try:
            facts[str(name)] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFault(f"{due}, got {name}={value!r:.60}") from error
    return facts


def close_environment(environment: Environment) -> None:
    """Close the environment; an error is a warning."""
    try:
        environment.close()
    except (Exception, SystemExit) as error:  # foreign code
        LOGGER.warning("%s.close %s", type(environment).__name__, describe(error))


class _Adapted(Environment):
    def __init__(self, adapted: EnvironmentLike) -> None:
        self.adapted = adapted

    def __reduce__(self) -> tuple[Any, ...]:
        return adapt, (self.adapted,)


def _forward(name: str) -> property:
    return property(lambda self: getattr(self.adapted, name))


def conversation(question: str, instruction: str) -> tuple[Message, ...]:
    """Return a question as messages, after an instruction if any.

    >>> conversation("6 * 7?", "")
    ({'role': 'user', 'content': '6 * 7?'},)
    """
    user: Message = {"role": "user", "content": question}
    return ({"role": "system", "content": instruction}, user) if instruction else (user,)


def ends_with_assistant(messages: Sequence[Message]) -> bool:
    """Return True for a conversation with a begun answer."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def split_prefill(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Split a begun answer off a conversation, "" without one."""
    return (messages[:-1], text_of(messages[-1])) if ends_with_assistant(messages) else (messages, "")


def text_of(message: Message) -> str:
    """Return a message's text, from text, parts, or nothing."""
    content: Any = message.get("content")
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def with_content(message: Message) -> dict[str, Any]:
    """Return a message with text as content, which many templates require."""
    content = message.get("content", "")
    is_text = content is None or (isinstance(content, list | tuple) and is_message(message))
    return {**message, "content": text_of(message) if is_text else content}


def are_words(said: object) -> bool:
    """Return True for text or messages."""
    if isinstance(said, str):
        return True
    return isinstance(said, Sequence) and all(map(is_message, said))


def is_message(message: object) -> bool:
    """Return True for a role with text, or with tool calls."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if content is None:
        return message["role"] == "assistant" and bool(message.get("tool_calls"))
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts)


def own_containers(value: Any) -> Any:
    """Return copies of containers, around the same objects."""
    if type(value) is dict:
        return {key: own_containers(held) for key, held in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(own_containers, value))
    return set(value) if type(value) is set else value
