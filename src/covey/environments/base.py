"""Define what an environment is: which prompts there are and what a completion is worth."""

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

from covey.environments.episode import Answer, Episode, Observation, answered
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
    """Have the two methods that make an object an environment. `adapt` gives it the others."""

    def prompts(self, split: Split) -> list[Prompt]: ...

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]: ...


@dataclass(frozen=True, slots=True)
class JudgeSummary:
    """Describe the learned judge whose score is the reward.

    >>> JudgeSummary(is_frozen=True, summary_line="judge ranks 93.0% of held-out texts above their corrupted versions")
    """

    is_frozen: bool
    """True where none of its weights can be trained."""
    summary_line: str
    """How often it is right, in one line."""


class Environment(ABC):
    """Supply prompts and judge completions. Everything but `prompts` and `score` has a default that does nothing.

    A *policy's* failure (unparsable answer, endless program) is a low Reward; a *system's* failure (crashed
    simulator, unreachable judge) is a Failure.
    """

    @abstractmethod
    def prompts(self, split: Split) -> list[Prompt]:
        """Return all prompts of a split, in a fixed order. The splits share no prompt."""

    @abstractmethod
    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        """Return one judgement for each completion (text without special tokens), in order."""

    # ---- judging

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        """Judge the sampled tokens besides their text: what a run calls.

        completion_ids are the tokens of each completion, the stop token included.
        """
        return await answered(self.score(prompt, completions))

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        """Return the next message of a conversation that ends with the policy's answer. None ends it.

        After a message the policy has another turn, and the last turn is scored.
        """
        return None

    def episode(self, prompt: Prompt, seed: int) -> Episode | None:
        """Return a new attempt at the prompt. None where one answer is all there is to it.

        `seed` is the attempt's own: whatever an episode draws must follow from it. An environment that has `reply`
        needs no episode of its own.
        """
        return Replies(self, prompt) if self.can_reply else None

    def judges_groups(self, prompt: Prompt) -> bool:
        """Return whether `score_group` judges the finished episodes of the prompt, in the stead of `Episode.score`."""
        return False

    async def score_group(
        self, prompt: Prompt, episodes: Sequence[Episode], conversations: Sequence[Sequence[Message]]
    ) -> list[Reward | Failure]:
        """Return one judgement for each finished episode of a group, in order: they may be compared.

        No episode is closed yet. `conversations` are what was said in each, from its first message.
        """
        raise NotImplementedError(f"{type(self).__name__}.judges_groups needs score_group")

    def max_turns(self, prompt: Prompt) -> int:
        """Return how many turns the policy has at most, where `environment.max_turns` is not set."""
        return DEFAULT_MAX_TURNS

    def tool_schemas(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the tools that the chat template shows the policy."""
        return ()

    @property
    def can_reply(self) -> bool:
        """Return whether `reply` may say something, so that a conversation may have several turns."""
        return type(self).reply is not Environment.reply

    def dry_run(self, prompt: Prompt) -> "tuple[Environment, Prompt] | None":
        """Return what tries the user's own reward code once before a run, and the prompt as that knows it.

        It judges as in training but counts and logs nothing, and where no judgement applies it gives 0. None where no
        code of the user's judges the prompt.
        """
        return None

    @property
    def part_weights(self) -> Mapping[str, float]:
        """Return the weight of each named part, where the reward is a weighted sum."""
        return {}

    def judge_summary(self) -> JudgeSummary | None:
        """Describe the learned judge. None where the reward comes from no model."""
        return None

    # ---- prompts

    def gold(self, prompt: Prompt) -> str | None:
        """Return a completion that must get the maximum reward, checked before a run. None where none is known."""
        return None

    def gold_turn(self, prompt: Prompt, conversation: Sequence[Message]) -> str | None:
        """Return what a perfect policy says next in an episode, played before a run. None where it is not known.

        The conversation begins with the prompt's messages.
        """
        return None

    def demonstrations(self, split: Split) -> Sequence[Demonstration]:
        """Return the material of a cold start: prompts with good completions."""
        return ()

    def difficulty(self, prompt: Prompt) -> float | None:
        """Return how hard a prompt is, for a curriculum: larger is harder, equal numbers are one level."""
        return None

    @property
    def sampling_weights(self) -> Mapping[str, float]:
        """Return how often each part of a mixture is drawn, relative to the others, by `Prompt.environment`."""
        return {}

    # ---- the run around it

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        """Receive how many steps are finished, of how many, and how many epochs of the training prompts."""
        return

    def metrics(self) -> Mapping[str, float]:
        """Return what there is to log since the last call."""
        return {}

    def facts(self) -> Mapping[str, Any]:
        """Return plain values for the record of a run, such as how untrusted programs are isolated."""
        return {}

    def read_with(self, tokenizer: Any) -> None:
        """Receive the policy's tokenizer, which knows how its model writes calls of tools."""
        return

    def watched_by(self, watchdog: Watchdog) -> None:
        """Name waits to the run's watchdog from now on."""
        return

    def close(self) -> None:
        """Release what would outlive the run."""
        return


class Replies(Episode):
    """Converse through `Environment.reply`, and leave the verdict on the last answer to `Environment.score`."""

    def __init__(self, environment: Environment, prompt: Prompt) -> None:
        self._environment = environment
        self._prompt = prompt

    async def reply(self, answer: Answer) -> Observation:
        """Return the next message. Done where there is none, or where no turn would follow it."""
        if answer.is_last:
            return Observation(done=True, stop_reason="max_turns")
        try:
            message = await answered(self._environment.reply(self._prompt, answer.conversation))
        except RunStopped:
            raise
        except (Exception, SystemExit) as error:  # foreign code: what there is can still be scored
            told = (self._prompt.id, self._prompt.environment, type(error).__name__, error)
            LOGGER.warning("prompt %s: %s.reply: %s: %s", *told)
            return Observation(done=True, stop_reason="failure")
        return Observation(done=True) if message is None else Observation((message,))


def adapt(environment: EnvironmentLike) -> Environment:
    """Return the environment with the defaults of `Environment` for every method that it lacks.

    An `Environment` is returned as it is; another object is wrapped once, where it enters a run. Either may have a
    plain `def` where this class has `async def`: these are called through `answered`. ValueError where something else
    has the name of a method. No property is evaluated.
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
    adapted: Environment = type(type(environment).__name__, (_Adapted,), forwarded)(environment)
    return adapted


def _attribute(environment: EnvironmentLike, name: str) -> Any:
    """Return an attribute, None where there is none. A property stays one: it may be dear, or not be ready yet."""
    found = getattr_static(environment, name, None)
    return found if isinstance(found, property | cached_property) else getattr(environment, name, None)


class EnvironmentFault(ValueError):
    """Says what a method of an environment raised or returned, and names both."""


def naming(environment: Environment, method: str) -> AbstractContextManager[None]:
    """Raise EnvironmentFault with environment, method and place for what is raised, as in `faults_of`."""
    return faults_of(f"{type(environment).__name__}.{method}")


@contextmanager
def faults_of(name: str) -> Iterator[None]:
    """Raise EnvironmentFault with a name and the place for what foreign code raises, but what ends a run on purpose.

    An environment that asks others for it leaves the fault to the one whose it is. What covey itself asserts keeps its
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
    """Tell the environment how far training is."""
    with naming(environment, "follow"):
        environment.follow(step, max_steps, epoch)


def metrics_of(environment: Environment) -> dict[str, float]:
    """Return what the environment has to log. None is nothing, an array of no dimension is its number.

    EnvironmentFault where another is no number.
    """
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
    """Return what the environment records of itself, as JSON gives it back.

    EnvironmentFault for what JSON cannot hold.
    """
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
    """Close the environment. What that raises is a warning: all that it judged is known by then."""
    try:
        environment.close()
    except (Exception, SystemExit) as error:  # foreign code
        LOGGER.warning("%s.close %s", type(environment).__name__, describe(error))


class _Adapted(Environment):
    """Forward to an object what it has of the methods of an environment."""

    def __init__(self, adapted: EnvironmentLike) -> None:
        self.adapted = adapted

    def __reduce__(self) -> tuple[Any, ...]:
        return adapt, (self.adapted,)


def _forward(name: str) -> property:
    return property(lambda self: getattr(self.adapted, name))


def conversation(question: str, instruction: str) -> tuple[Message, ...]:
    """Return a question as the user's message, after a system message where there is an instruction.

    >>> conversation("6 * 7?", "")
    ({'role': 'user', 'content': '6 * 7?'},)
    """
    user: Message = {"role": "user", "content": question}
    return ({"role": "system", "content": instruction}, user) if instruction else (user,)


def ends_with_assistant(messages: Sequence[Message]) -> bool:
    """Return whether a conversation ends with the begin of the answer, which the policy continues."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def split_prefill(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Split the begin of the assistant's answer off a conversation. "" where there is none."""
    return (messages[:-1], text_of(messages[-1])) if ends_with_assistant(messages) else (messages, "")


def text_of(message: Message) -> str:
    """Return the text of a message, whose content is text, a list of parts of text, or none beside tool calls."""
    content: Any = message.get("content")
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def with_content(message: Message) -> dict[str, Any]:
    """Return a message as chat templates take it: many fail at a call of tools that has no content."""
    return {**message, "content": ""} if message.get("content") is None else dict(message)


def are_words(said: object) -> bool:
    """Return whether it is text, or messages."""
    if isinstance(said, str):
        return True
    return isinstance(said, Sequence) and all(map(is_message, said))


def is_message(message: object) -> bool:
    """Return whether it has a role and text. A call of tools needs no text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if content is None:
        return message["role"] == "assistant" and bool(message.get("tool_calls"))
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts)


def own_containers(value: Any) -> Any:
    """Return copies of lists, dictionaries and sets, for foreign code to change, around the same objects."""
    if type(value) is dict:
        return {key: own_containers(held) for key, held in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(own_containers, value))
    return set(value) if type(value) is set else value
