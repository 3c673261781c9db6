"""Probe a model's own cache for exact computations.

Shapes: R rows, T tokens, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.policy.attention.forked import Held
from covey.policy.kernels.gpu.inductor import without_compiling
from covey.policy.models.caches import Caching, cache_bytes, fork_rows, take_rows
from covey.policy.models.general import can_widen, in_float32, logits_error
from covey.policy.models.text import ordinary_ids
from covey.policy.policy import Policy, inference, to_device

LOGGER = logging.getLogger(__name__)
PROMPT, OWN = 12, 8
"""Tokens of the probe's prompt and of each continuation, positions permitting."""
ERROR, HALF_ERROR = 1e-3, 0.3
"""Largest difference to transformers' own computation, never in half precision, in standard deviations."""


@torch.no_grad()
def probe_caching(policy: Policy) -> Caching:
    """Find the exact computations of the policy's own cache."""
    with inference(policy.model), without_compiling():
        with in_float32(policy) as exact:
            probe = _Probe.of(exact)
            forks, reads_on = (_holds(check, policy) for check in (probe.forks, probe.reads_on))
        if not forks:
            kind = type(policy.causal_lm).__name__
            LOGGER.warning("%s has no cache whose rows can be taken: texts are encoded again for each token", kind)
            return Caching()
        probe = replace(probe, policy=policy)
        small, large = (cache_bytes(probe.read(probe.prompt[:length])) for length in (1, len(probe.prompt)))
    token_bytes = (large - small) // max(1, len(probe.prompt) - 1)
    return Caching(True, reads_on, token_bytes, max(0, large - token_bytes * len(probe.prompt)))


def _holds(check: Callable[[], list[tuple[Tensor, Tensor]]], policy: Policy) -> bool:
    """Return True where found logits are the expected ones up to rounding."""
    try:
        pairs = check()
    except Exception as error:  # foreign code, which may trip over its cache in any way
        LOGGER.info("%s: %r", type(policy.causal_lm).__name__, error)
        return False
    found, expected = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    is_exact = can_widen(policy)
    return logits_error(found, expected, is_exact) <= (ERROR if is_exact else HALF_ERROR)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A prompt with two continuations, and the logits of whole texts."""

    policy: Policy
    prompt: list[int]
    own: list[list[int]]
    whole: list[Tensor]
    """Logits (own tokens, V) after each token, by continuation."""

    @classmethod
    def of(cls, policy: Policy) -> "_Probe":
        room = min(PROMPT + OWN, policy.max_length)
        length, chosen = room - room * OWN // (PROMPT + OWN), ordinary_ids(policy, 2 * (PROMPT + OWN))
        prompt, own = chosen[:length], [chosen[start : start + room - length] for start in (PROMPT, PROMPT + OWN)]
        whole = [policy.read(to_device([[*prompt, *ids]], policy.device), {}, False)[0] for ids in own]
        return cls(policy, prompt, own, [logits[0, length:] for logits in whole])

    def after(self, ids_RT: Sequence[Sequence[int]], held: Held) -> tuple[Tensor, Held]:
        """Return the logits (R, V) after rows, and the cache."""
        out, held = self.policy.read(to_device(ids_RT, self.policy.device), held, True, only_last=True)
        return out[:, -1], held

    def read(self, prompt: list[int]) -> Held:
        return self.after([prompt], {})[1]

    def forks(self) -> list[tuple[Tensor, Tensor]]:
        """Decode continuations in lockstep, and one alone from half way."""
        pairs, held, places = [], fork_rows(self.read(self.prompt), torch.tensor([0, 0, 0])), [0, 1, 0]
        for step in range(len(self.own[0])):
            if step == len(self.own[0]) // 2:
                take_rows(held, torch.tensor([1]))
                places = [1]
            logits_RV, held = self.after([[self.own[place][step]] for place in places], held)
            pairs.append((logits_RV, torch.stack([self.whole[place][step] for place in places])))
        return pairs

    def reads_on(self) -> list[tuple[Tensor, Tensor]]:
        """Read continuations at once, after a prompt in two parts."""
        _, held = self.after([self.prompt[1:]], self.read(self.prompt[:1]))
        logits_RV, _ = self.after(self.own, fork_rows(held, torch.tensor([0, 0])))
        return [(logits_RV, torch.stack([logits[-1] for logits in self.whole]))]
