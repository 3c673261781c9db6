"""The inputs of advantage estimators, and the statistics they share.

Shapes: N rollouts of the batch, K reward functions. Group statistics need complete groups: gather the rewards of all
ranks first. A NaN reward means "not scored": it enters no statistic and its advantage is 0.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from covey.system.lookup import one_of
from covey.types import UNREWARDED, Prompt

SINGLETON = ("zero", "raw", "error")
ROUNDING = 1e-12
"""Spread of equal values, as a share of the terms that were added up to them."""


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """The text behind one row of `Scores`, for a custom advantage.

    >>> ScoredCompletion(prompt, text="48", token_ids=(8, 12, 2), truncated=False)
    """

    prompt: Prompt
    text: str
    """The completion, decoded; "" where it could not be scored."""
    token_ids: tuple[int, ...]
    """The tokens the policy wrote."""
    truncated: bool
    """Whether the token limit ended it."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a batch, episode after episode, each episode's in order.

    >>> as_turns(rollouts=[0, 0, 1], rewards=[0.5, 0.0, 0.0], lengths=[3, 2, 4]).places
    [0, 1, 0]
    """

    rollouts_M: Tensor
    """int64: the episode of each turn, as an index into the N of `Scores`."""
    rewards_M: Tensor
    lengths_M: Tensor
    """Tokens the policy wrote in each turn, same dtype as the rewards."""
    states: tuple[str, ...]
    """The state in which each turn began; "" where it has no name."""

    @property
    def places(self) -> list[int]:
        """Return each turn's place in its episode, from 0."""
        places: list[int] = []
        seen: dict[int, int] = {}
        for rollout in self.rollouts_M.tolist():
            places.append(seen.get(rollout, 0))
            seen[rollout] = places[-1] + 1
        return places


def as_turns(
    rollouts: Sequence[int], rewards: Sequence[float], lengths: Sequence[int] = (), states: Sequence[str] = ()
) -> Turns:
    """Make Turns from lists; lengths default to 1, states to no name."""
    return Turns(
        torch.tensor(rollouts, dtype=torch.int64),
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(lengths or [1] * len(rewards), dtype=torch.float64),
        tuple(states) or ("",) * len(rewards),
    )


@dataclass(frozen=True, slots=True)
class Scores:
    """The rollouts of a batch in columns, for shaping, estimators and turn credit.

    >>> scores([1.0, 0.0, 0.5], ["a", "a", "b"]).groups_N
    tensor([0, 0, 1])
    """

    rewards_N: Tensor
    """Float; NaN where the rollout was not scored."""
    groups_N: Tensor
    """int64, from 0. Groups may interleave and differ in size."""
    lengths_N: Tensor
    """Loss tokens of each rollout, same dtype as the rewards; 0 where a setting masks the rollout."""
    written_N: Tensor
    """Tokens the policy wrote in each rollout, in the loss or not."""
    total_lengths_N: Tensor
    """All tokens: prompt, completions and the environment's replies."""
    turns_N: Tensor
    """Completions in each rollout."""
    truncated_N: Tensor
    """bool: the token limit ended the rollout."""
    penalties_N: Tensor
    """KL penalty on each reward, weighted, to be subtracted after shaping."""
    parts_NK: Tensor
    """Rewards by reward function, NaN where one does not apply; (N, 0) without any."""
    weights_K: Tensor
    """Weight of each part."""
    part_names: tuple[str, ...]
    roles: tuple[str, ...]
    """Environment of each rollout: the role that the policy played in self-play."""
    token_ids: tuple[tuple[int, ...], ...]
    """Tokens the policy wrote in each rollout."""
    turns: Turns
    """Turns of all rollouts that were scored; none where the turns of a rollout share its advantage."""
    prompts: tuple[Prompt, ...] = ()
    """Prompt of each rollout; () unless a custom advantage takes `answers`, as prompts may be large."""
    texts: tuple[str, ...] = ()
    """Completion of each rollout, decoded; as `prompts`."""
    preferences_NN: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """Probability that rollout i beats rollout j, from a judge; (0, 0) without one."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Running baseline by role at the start of the batch; a missing role starts at 0."""

    def __post_init__(self) -> None:
        n = len(self.rewards_N)
        lengths = {name: len(getattr(self, name)) for name in (*TENSORS, "parts_NK", "roles", "token_ids")}
        assert set(lengths.values()) == {n}, f"{n} rewards have columns of lengths {lengths}"
        assert self.parts_NK.shape[1] == len(self.weights_K), f"{self.parts_NK.shape}, {len(self.weights_K)} weights"

    @property
    def scored(self) -> Tensor:
        """Return (N,), True where there is a reward."""
        return ~self.rewards_N.isnan()

    @property
    def earned(self) -> Tensor:
        """Return the rewards, NaN too where a teacher trains alone."""
        if UNREWARDED not in self.part_names:
            return self.rewards_N
        applies_N = ~self.parts_NK[:, self.part_names.index(UNREWARDED)].isnan()
        return self.rewards_N.masked_fill(applies_N, torch.nan)

    @property
    def num_groups(self) -> int:
        return count_groups(self.groups_N)

    @property
    def answers(self) -> tuple[ScoredCompletion, ...]:
        """Return each rollout as a custom advantage of two arguments sees it."""
        columns = zip(self.prompts, self.texts, self.token_ids, self.truncated_N.tolist(), strict=True)
        return tuple(ScoredCompletion(*row) for row in columns)

    def rows(self, places_M: Tensor) -> "Scores":
        """Select rows, possibly repeatedly; the turns stay."""
        places = places_M.tolist()
        tensors = {name: getattr(self, name)[places_M] for name in (*TENSORS, "parts_NK")}
        lists: dict[str, Any] = {
            name: tuple(column[place] for place in places) for name in LISTS if (column := getattr(self, name))
        }
        return replace(self, **tensors, **lists)


TENSORS = (
    *("rewards_N", "groups_N", "lengths_N", "written_N", "total_lengths_N", "turns_N", "truncated_N", "penalties_N"),
)
LISTS = ("roles", "token_ids", "prompts", "texts")
"""Columns of `Scores`, those of parts and turns aside."""


def join(ranks: Sequence[Scores]) -> Scores:
    """Stack the rows of all ranks, groups apart, missing parts NaN."""
    firsts = accumulate((own.num_groups for own in ranks[:-1]), initial=0)
    columns: dict[str, Any] = {name: torch.cat([getattr(own, name) for own in ranks]) for name in TENSORS}
    columns |= {name: tuple(chain.from_iterable(getattr(own, name) for own in ranks)) for name in LISTS}
    columns["groups_N"] = torch.cat([own.groups_N + first for own, first in zip(ranks, firsts, strict=True)])
    starts = accumulate((len(own.rewards_N) for own in ranks[:-1]), initial=0)
    turns = [own.turns.rollouts_M + start for own, start in zip(ranks, starts, strict=True)]
    weights = {name: weight for own in ranks for name, weight in zip(own.part_names, own.weights_K, strict=True)}
    return Scores(
        **columns,
        parts_NK=torch.cat([_named_parts(own, tuple(weights)) for own in ranks]),
        weights_K=torch.stack(list(weights.values())) if weights else ranks[0].weights_K,
        part_names=tuple(weights),
        turns=Turns(
            torch.cat(turns),
            torch.cat([own.turns.rewards_M for own in ranks]),
            torch.cat([own.turns.lengths_M for own in ranks]),
            tuple(chain.from_iterable(own.turns.states for own in ranks)),
        ),
    )


def _named_parts(given: Scores, names: Sequence[str]) -> Tensor:
    known = dict(zip(given.part_names, given.parts_NK.unbind(1), strict=True))
    missing_N = torch.full_like(given.rewards_N, torch.nan)
    return torch.stack([known.get(name, missing_N) for name in names], dim=1) if names else given.parts_NK


def scores(
    rewards: Any,
    groups: Sequence[Hashable],
    *,
    lengths: Any = None,
    parts: Any = None,
    weights: Any = None,
    roles: Sequence[str] = (),
) -> Scores:
    """Make Scores from lists or tensors, in float64; group labels are hashable.

    Without lengths every rollout counts one token; without weights every part counts 1. Each rollout is one whole
    completion, all of it loss tokens.
    """
    rewards_N = _float64(rewards)
    n = len(rewards_N)
    groups_N = number_labels(groups.tolist() if isinstance(groups, Tensor) else groups)
    lengths_N = torch.ones_like(rewards_N) if lengths is None else _float64(lengths)
    parts_NK = rewards_N.new_zeros(n, 0) if parts is None else _float64(parts)
    return Scores(
        rewards_N=rewards_N,
        groups_N=groups_N,
        lengths_N=lengths_N,
        written_N=lengths_N,
        total_lengths_N=lengths_N,
        turns_N=torch.ones_like(rewards_N),
        truncated_N=torch.zeros(n, dtype=torch.bool),
        penalties_N=torch.zeros_like(rewards_N),
        parts_NK=parts_NK,
        weights_K=rewards_N.new_ones(parts_NK.shape[1]) if weights is None else _float64(weights),
        part_names=tuple(map(str, range(parts_NK.shape[1]))),
        roles=tuple(roles) or ("",) * n,
        token_ids=((),) * n,
        turns=as_turns([], []),
    )


def number_labels(labels: Iterable[Hashable]) -> Tensor:
    """Number labels from 0 in the order they come, int64; equal ones alike."""
    known: dict[Hashable, int] = {}
    return torch.tensor([known.setdefault(label, len(known)) for label in labels], dtype=torch.int64)


def count_groups(groups_N: Tensor) -> int:
    return int(groups_N.max()) + 1 if len(groups_N) else 0


def scored_members(given: Scores) -> list[Tensor]:
    """Return indices of the scored rollouts of each group that has any."""
    grouped = [((given.groups_N == group) & given.scored).nonzero()[:, 0] for group in range(given.num_groups)]
    return [members_M for members_M in grouped if len(members_M)]


def over_group(values_N: Tensor, groups_N: Tensor, reduce: str = "sum") -> Tensor:
    """Return the sum (or amin, amax) over each rollout's group, (N,)."""
    empty_G = values_N.new_zeros(count_groups(groups_N))
    return empty_G.scatter_reduce(0, groups_N, values_N, reduce, include_self=False)[groups_N]


def count_scored(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    return over_group((~rewards_N.isnan()).to(rewards_N.dtype), groups_N)


def center(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Reward minus group mean, 0 where not scored.

    The smallest reward of the group is taken off first: equal rewards then give exactly 0, and a large common
    offset costs no precision.
    """
    scored_N = ~rewards_N.isnan()
    low_N = over_group(torch.where(scored_N, rewards_N, torch.inf), groups_N, "amin")
    shifted_N = torch.where(scored_N, rewards_N - low_N, 0.0)
    mean_N = over_group(shifted_N, groups_N) / count_scored(rewards_N, groups_N).clamp(min=1)
    return torch.where(scored_N, shifted_N - mean_N, 0.0)


def group_std(rewards_N: Tensor, groups_N: Tensor, ddof: int = 1) -> Tensor:
    """Return each group's standard deviation, 0 for ddof scored members or fewer."""
    squares_N = over_group(center(rewards_N, groups_N) ** 2, groups_N)
    freedom_N = count_scored(rewards_N, groups_N) - ddof
    return torch.where(freedom_N > 0, squares_N / freedom_N.clamp(min=1), 0.0).sqrt()


def divide(values_N: Tensor, scale: Tensor, eps: float, eps_mode: str = "add") -> Tensor:
    """Divide values by scale and eps, 0 where the divisor is 0.

    eps_mode: add divides by scale + eps, floor by max(scale, eps).
    """
    one_of("eps_mode", eps_mode, ("add", "floor"))
    divisor = scale + eps if eps_mode == "add" else scale.clamp(min=eps)
    return torch.where(divisor > 0, values_N / torch.where(divisor > 0, divisor, 1.0), 0.0)


def apply_singleton(advantages_N: Tensor, raw_N: Tensor, given: Scores, singleton: str) -> Tensor:
    """Replace the advantage of a group's only scored rollout. zero: 0. raw: `raw_N`, as in verl. error: ValueError."""
    one_of("singleton", singleton, SINGLETON)
    count_N = count_scored(given.rewards_N, given.groups_N)
    if singleton == "error" and bool((count_N < 2).any()):
        raise ValueError(f"singleton=error needs 2 scored rollouts in every group, got {int(count_N.min())}")
    alone_N = (count_N < 2) & given.scored
    return torch.where(alone_N, raw_N if singleton == "raw" else 0.0, advantages_N)


def batch_std(values_N: Tensor, ddof: int = 1) -> Tensor:
    """Return the standard deviation of non-NaN values, 0 for ddof or fewer."""
    kept = values_N[~values_N.isnan()]
    if len(kept) <= ddof:
        return values_N.new_zeros(())
    return (((kept - kept.mean()) ** 2).sum() / (len(kept) - ddof)).sqrt()


def batch_zscore(values_N: Tensor, scored_N: Tensor, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Return (value - mean) / (std + eps) over scored rollouts, else 0."""
    if not bool(scored_N.any()):
        return torch.zeros_like(values_N)
    known_N = torch.where(scored_N, values_N, torch.nan)
    shifted_N = torch.where(scored_N, values_N - values_N[scored_N].mean(), 0.0)
    return divide(shifted_N, batch_std(known_N, ddof), eps)


def whiten_tokens(
    values_N: Tensor,
    scored_N: Tensor,
    lengths_N: Tensor,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_mode: str = "var_add",
) -> Tensor:
    """Whiten over scored rollouts' loss tokens, (N,).

    Each token repeats the value of its rollout, so long completions weigh more.
    var_add divides by sqrt(var + eps), var_floor by sqrt(max(var, eps)).
    """
    one_of("eps_mode", eps_mode, ("var_add", "var_floor"))
    weights_N = torch.where(scored_N, lengths_N, 0.0)
    total = weights_N.sum()
    if total <= ddof:
        return torch.zeros_like(values_N)
    # From the smallest, as in `center`: equal values give exactly 0, at any size.
    above_N = values_N - values_N[weights_N > 0].min()
    shifted_N = torch.where(scored_N, above_N - (weights_N * above_N).nansum() / total, 0.0)
    variance = (weights_N * shifted_N**2).sum() / (total - ddof)
    floored = variance + eps if eps_mode == "var_add" else variance.clamp(min=eps)
    return divide(shifted_N, floored.sqrt(), 0.0)


def _float64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)
