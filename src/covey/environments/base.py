"""The environment seam: which prompts there are and what a completion is worth."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from covey.types import Failure, Message, Prompt, Reward

Split = Literal["train", "test"]


@runtime_checkable
class Environment(Protocol):
    """Supplies prompts and judges completions.

    A *policy's* failure (unparsable answer, endless program) is a low Reward; a *system's* failure (crashed
    simulator, unreachable judge) is a Failure.
    """

    def prompts(self, split: Split) -> list[Prompt]:
        """All prompts of a split, in a fixed order. The splits share no prompt."""
        ...

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        """One judgement for each completion (text without special tokens), in order."""
        ...


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that can show how it is done: the material of a cold start."""

    def demonstrations(self, split: Split) -> Sequence[tuple[Prompt, str | Sequence[int]]]:
        """(prompt, good completion) pairs, as text or as tokens. The end-of-sequence token is added by the cold
        start."""
        ...


@runtime_checkable
class HasGold(Protocol):
    """An environment that knows right answers: they must score full marks before a run begins."""

    def gold(self, prompt: Prompt) -> str | None:
        """A completion that deserves full marks, scored like any other; None where none is known."""
        ...


@runtime_checkable
class ReadsTokens(Protocol):
    """An environment that judges the sampled tokens besides their text; `score_tokens` is called instead of `score`."""

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        """Like `score`; completion_ids are the tokens of each completion, the stop token included."""
        ...


@runtime_checkable
class Tries(Protocol):
    """An environment that judges with the user's own code, which is tried once before a run begins."""

    def trial(self, prompt: Prompt) -> tuple[Environment, Prompt] | None:
        """What judges it, and the prompt as that knows it; None where no code of the user's does.

        It judges as in training but counts and logs nothing, and where no judgement applies it gives 0.
        """
        ...


@runtime_checkable
class Replies(Protocol):
    """An environment that may say something to a completion; the policy then has a second turn, and that is scored."""

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        """The next message of the conversation, which ends with the policy's answer; None where there is no more."""
        ...


@runtime_checkable
class Describes(Protocol):
    """An environment whose judgements rest on something that belongs into the record of a run."""

    def facts(self) -> Mapping[str, Any]:
        """Plain values, such as how untrusted programs are isolated."""
        ...


@runtime_checkable
class Logs(Protocol):
    """An environment with numbers of its own to log."""

    def metrics(self) -> Mapping[str, float]:
        """What there is to log since this was last asked."""
        ...


@runtime_checkable
class Follows(Protocol):
    """An environment whose judgement may depend on how far training is."""

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        """Hear how many steps are finished, of how many, and how often the training prompts were passed over."""
        ...


@runtime_checkable
class Judges(Protocol):
    """An environment whose reward is what a learned judge says."""

    @property
    def is_frozen(self) -> bool:
        """Whether nothing of the judge can be trained."""
        ...

    @property
    def story(self) -> str:
        """In one line, how often it is right."""
        ...


@runtime_checkable
class Weighs(Protocol):
    """An environment whose reward is a weighted sum of parts."""

    @property
    def part_weights(self) -> Mapping[str, float]:
        """Weight of each named part."""
        ...


@runtime_checkable
class Graded(Protocol):
    """An environment that says how hard its prompts are: what a curriculum orders them by."""

    def difficulty(self, prompt: Prompt) -> float | None:
        """Larger is harder, equal numbers are one level; None where nothing is said about this prompt."""
        ...


@runtime_checkable
class Mixes(Protocol):
    """An environment made of several, whose prompts take turns."""

    @property
    def turn_weights(self) -> Mapping[str, float]:
        """How often each takes its turn, relative to the others, by `Prompt.environment`."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An environment that holds something to let go of at the end of a run."""

    def close(self) -> None: ...


def conversation(question: str, instruction: str) -> tuple[Message, ...]:
    """A question as the user's message, after what the system says; an empty instruction sends no system message.

    >>> conversation("6 * 7?", "")
    ({'role': 'user', 'content': '6 * 7?'},)
    """
    user: Message = {"role": "user", "content": question}
    return ({"role": "system", "content": instruction}, user) if instruction else (user,)


def ends_with_assistant(messages: Sequence[Message]) -> bool:
    """Return whether a conversation ends with the begin of the answer, which the policy goes on from."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def split_prefill(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Return a conversation without the begin of the assistant's answer, and that; "" where there is none."""
    return (messages[:-1], text_of(messages[-1])) if ends_with_assistant(messages) else (messages, "")


def text_of(message: Message) -> str:
    """Return what a message says: its content is text, or a list of parts of text."""
    content: Any = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class RunStopped(RuntimeError):
    """Raised by an environment to end the run on purpose; the message says why in one line."""
