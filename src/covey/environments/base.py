"""The environment seam: which prompts there are and what a completion is worth."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from covey.types import Failure, Prompt, Reward

Split = Literal["train", "test"]


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

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        """(prompt, good completion text) pairs. The end-of-sequence token is added by the cold start."""
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
class Logs(Protocol):
    """An environment with numbers of its own to log."""

    def metrics(self) -> Mapping[str, float]:
        """What there is to log since this was last asked."""
        ...


@runtime_checkable
class Weighs(Protocol):
    """An environment whose reward is a weighted sum of parts."""

    @property
    def part_weights(self) -> Mapping[str, float]:
        """Weight of each named part."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An environment that holds something to let go of at the end of a run."""

    def close(self) -> None: ...


class RunStopped(RuntimeError):
    """Raised by an environment to end the run on purpose; the message says why in one line."""
