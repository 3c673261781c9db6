"""Read tokens by transformers' own forward, and cache where exact.

Shapes: R rows, T tokens, V vocabulary.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from covey.engine.native.cache import CacheShape
from covey.policy.kernels.gpu.inductor import without_compiling
from covey.policy.models.caches import cache_bytes, cache_keyword, fork_rows, join_rows, take_rows
from covey.policy.models.general import logits_error
from covey.policy.models.probe import ERROR, HALF_ERROR
from covey.policy.models.text import ordinary_ids
from covey.policy.policy import Policy, inference, to_device

LOGGER = logging.getLogger(__name__)
PROMPT, OWN = 12, 8
"""Tokens of the probe's prompt and of each continuation, positions permitting."""

Held = Mapping[str, object]
"""A cache under the model's keyword for it; empty: none."""


@dataclass(frozen=True, slots=True)
class StateShape(CacheShape):
    """The cached bytes of a row, in slots of a token's size."""

    token_bytes: int = 0
    state_bytes: int = 0
    """Of what does not grow with the tokens."""

    @property
    def slot_bytes(self) -> int:
        return max(1, self.token_bytes)

    @property
    def state_slots(self) -> int:
        return -(-self.state_bytes // self.slot_bytes)

    def max_slots(self, cache_bytes: int) -> int:
        """Return the slots within the budget."""
        return cache_bytes // self.slot_bytes


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads tokens after a cache, if the probe found it exact."""

    policy: Policy
    shape: StateShape
    forks: bool = False
    """Rows of a cache may be taken, and continue token by token; else texts are read again for each token."""
    reads_on: bool = False
    """Several tokens at once may follow a cache."""
    rows: bool = True
    """Texts may begin beside others."""

    def read(self, ids_RT: Sequence[Sequence[int]], held: Held) -> tuple[Tensor, Held]:
        """Read rows of equal length; return last logits (R, V) and cache."""
        if not held and not self.rows and len(ids_RT) > 1:
            logits, caches = zip(*(self.read([ids], {}) for ids in ids_RT), strict=True)
            return torch.cat(logits), join_rows(caches)
        one_by_one = bool(held) and not self.reads_on
        stretches = [[[ids[place]] for ids in ids_RT] for place in range(len(ids_RT[0]))] if one_by_one else [ids_RT]
        for stretch in stretches:
            out = forward(self.policy, stretch, held, use_cache=self.forks, only_last=True)
            held = cache_keyword(out) if self.forks else {}
        return out["logits"][:, -1], held


def forward(
    policy: Policy, ids_RT: Sequence[Sequence[int]], held: Held, *, use_cache: bool, only_last: bool
) -> Mapping[str, Tensor]:
    """Return the output of transformers' own forward pass."""
    keep = {"logits_to_keep": 1} if only_last and _takes_last(type(policy.causal_lm).forward) else {}
    with policy.autocast():
        out: Mapping[str, Tensor] = policy.causal_lm(
            input_ids=to_device([list(ids) for ids in ids_RT], policy.device), use_cache=use_cache, **keep, **held
        )
    return out


@cache
def _takes_last(function: Callable[..., object]) -> bool:
    return "logits_to_keep" in inspect.signature(function).parameters


@torch.no_grad()
def probe_reader(policy: Policy) -> Reader:
    """Return a reader that uses caches as far as they are exact."""
    shape = StateShape((), policy.precision, policy.device)
    with inference(policy.model), without_compiling():
        probe = _Probe.of(policy)
        rows, forks = _holds(probe.rows, policy), _holds(probe.forks, policy)
        reads_on = forks and _holds(probe.reads_on, policy)
        if not forks:
            kind = type(policy.causal_lm).__name__
            LOGGER.warning("%s has no cache whose rows can be taken: texts are encoded again for each token", kind)
            return Reader(policy, shape, rows=rows)
        small, large = (cache_bytes(probe.read_prompt(probe.prompt[:length])) for length in (1, len(probe.prompt)))
    token_bytes = (large - small) // max(1, len(probe.prompt) - 1)
    shape = replace(shape, token_bytes=token_bytes, state_bytes=max(0, large - token_bytes * len(probe.prompt)))
    return Reader(policy, shape, forks, reads_on, rows)


def _holds(check: Callable[[], list[tuple[Tensor, Tensor]]], policy: Policy) -> bool:
    """Return True where found logits are the expected ones up to rounding."""
    try:
        pairs = check()
    except Exception as error:  # foreign code, which may trip over its cache in any way
        LOGGER.info("%s: %r", type(policy.causal_lm).__name__, error)
        return False
    found, expected = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return logits_error(policy, found, expected) <= (ERROR if policy.computes_whole else HALF_ERROR)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A prompt with two continuations, and the logits of whole texts."""

    policy: Policy
    prompt: list[int]
    own: list[list[int]]
    whole: list[Tensor]
    """By continuation, logits (own tokens, V) after each of its tokens."""

    @classmethod
    def of(cls, policy: Policy) -> "_Probe":
        room = min(PROMPT + OWN, policy.max_length)
        length, chosen = room - room * OWN // (PROMPT + OWN), ordinary_ids(policy, 2 * (PROMPT + OWN))
        prompt, own = chosen[:length], [chosen[start : start + room - length] for start in (PROMPT, PROMPT + OWN)]
        whole = [forward(policy, [[*prompt, *ids]], {}, use_cache=False, only_last=False)["logits"] for ids in own]
        return cls(policy, prompt, own, [logits[0, length:] for logits in whole])

    def read_prompt(self, prompt: list[int]) -> Held:
        return cache_keyword(forward(self.policy, [prompt], {}, use_cache=True, only_last=True))

    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """Read whole texts beside each other."""
        texts = [[*self.prompt, *ids] for ids in self.own]
        out = forward(self.policy, texts, {}, use_cache=False, only_last=False)
        return [(out["logits"][:, len(self.prompt) :].flatten(0, 1), torch.cat(self.whole))]

    def forks(self) -> list[tuple[Tensor, Tensor]]:
        """Decode continuations in lockstep, and one alone from half way."""
        pairs, held, places = [], fork_rows(self.read_prompt(self.prompt), torch.tensor([0, 0, 0])), [0, 1, 0]
        for step in range(len(self.own[0])):
            if step == len(self.own[0]) // 2:
                take_rows(held, torch.tensor([1]))
                places = [1]
            out = forward(
                self.policy, [[self.own[place][step]] for place in places], held, use_cache=True, only_last=True
            )
            held = cache_keyword(out)
            pairs.append((out["logits"][:, -1], torch.stack([self.whole[place][step] for place in places])))
        return pairs

    def reads_on(self) -> list[tuple[Tensor, Tensor]]:
        """Read continuations at once, after a prompt in two parts."""
        held = self.read_prompt(self.prompt[:1])
        held = cache_keyword(forward(self.policy, [self.prompt[1:]], held, use_cache=True, only_last=True))
        held = fork_rows(held, torch.tensor([0, 0]))
        out = forward(self.policy, self.own, held, use_cache=True, only_last=True)
        return [(out["logits"][:, -1], torch.stack([logits[-1] for logits in self.whole]))]
