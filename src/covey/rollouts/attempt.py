"""An attempt as segments of tokens, and its rollout."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from covey.types import Completion, Failure, Message, Reward, Rollout, Span, StopReason, Turn


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one speaker, with the completion if sampled.

    >>> Segment((7, 9), "user", turn=1)
    >>> Segment((8, 2), "assistant", turn=1, completion=Completion((8, 2), (-0.1, -0.2), "stop", policy_version=3))
    """

    ids: tuple[int, ...]
    role: str
    turn: int
    """Turns that the policy had begun before it; the prompt's is 0."""
    completion: Completion | None = None
    """None: the tokens are given."""


def to_segment(completion: Completion, turn: int) -> Segment:
    return Segment(completion.token_ids, "assistant", turn, completion)


@dataclass(slots=True)
class Attempt:
    """A running attempt; a rewritten history begins a branch of segments."""

    branches: list[list[Segment]]
    version: int = 0
    """Version of the engine's weights when it began: where no turn has room, no token says so."""
    messages: list[Message] = field(default_factory=list)
    """Messages since the policy's first turn began, the answer of a single turn included."""
    opening: tuple[Message, ...] = ()
    """Messages that the episode added to the prompt before that."""
    turns: list[Turn] = field(default_factory=list)
    """The policy's turns. The places of their tokens are filled in when the rollout is made."""
    stop_reason: StopReason | None = None
    re_encoded_tokens: int = 0
    verdict: Reward | Failure | None = None
    """The episode's own; None leaves it to the environment."""
    conversation: tuple[Message, ...] = ()
    """All that was said, from the first message of the prompt, once the episode is over."""

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.branches[-1] for token in segment.ids]

    @property
    def completions(self) -> list[Completion]:
        return completions_of(self.branches)


def completions_of(branches: Iterable[Iterable[Segment]]) -> list[Completion]:
    return [segment.completion for branch in branches for segment in branch if segment.completion is not None]


def rollout_of(attempt: Attempt, reward: Reward, text: str) -> Rollout:
    """Build an episode's rollout; `text` is everything since the prompt."""
    completions = attempt.completions
    ends = list(accumulate((len(completion.token_ids) for completion in completions), initial=0))
    turns = tuple(
        replace(turn, start=start, end=end) for turn, (start, end) in zip(attempt.turns, pairwise(ends), strict=True)
    )
    said = (*attempt.opening, *attempt.messages)
    rollout = build_rollout(attempt.branches, reward, text)
    return replace(
        rollout,
        policy_version=rollout.policy_version if completions else attempt.version,
        messages=said if len(said) > 1 else (),
        turns=turns,
        stop_reason=attempt.stop_reason,
        re_encoded_tokens=attempt.re_encoded_tokens,
    )


def build_rollout(branches: Sequence[Sequence[Segment]], reward: Reward, text: str) -> Rollout:
    """Build a rollout with the causal shift: position t predicts token t + 1.

    Each branch is shifted by itself. Given tokens are read, and not learnt.
    """
    ids: list[int] = []
    targets: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    starts: list[int] = []
    for branch in branches:
        own = [token for segment in branch for token in segment.ids]
        chosen = [segment.completion is not None for segment in branch for _ in segment.ids]
        of_sampler = [p for s in branch for p in (s.completion.logprobs if s.completion else (0.0,) * len(s.ids))]
        starts.append(len(ids))
        ids += own[:-1]
        targets += own[1:]
        mask += chosen[1:]
        logprobs += of_sampler[1:]
    completions = completions_of(branches)
    return Rollout(
        input_ids=tuple(ids),
        target_ids=tuple(targets),
        loss_mask=tuple(mask),
        sampler_logprobs=tuple(logprobs),
        reward=reward,
        text=text,
        finish_reason=completions[-1].finish_reason if completions else "length",
        policy_version=min((completion.policy_version for completion in completions), default=0),
        spans=_spans(completions),
        branches=tuple(starts) if len(starts) > 1 else (),
    )


def _spans(completions: Sequence[Completion]) -> tuple[Span, ...]:
    """Return the token versions of all turns, empty for a single version."""
    if not any(completion.spans for completion in completions) and len({c.policy_version for c in completions}) <= 1:
        return ()
    spans: list[Span] = []
    for completion in completions:
        before = spans[-1].end if spans else 0
        length = len(completion.token_ids)
        for span in completion.spans or (Span(completion.policy_version, 0, length),):
            spans.append(Span(span.version, before + span.start, before + span.end))
    return tuple(spans)
