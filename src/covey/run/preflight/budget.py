"""How many tokens a check may look at in a few seconds, by a forward pass that is timed first.

A large policy on a slow machine is compared on fewer and shorter completions, never on none: what a layout leaks or a
kernel gets wrong is there at the first tokens already, and the longest sequence is looked at without a gradient.
"""

from collections.abc import Sequence
from dataclasses import replace

from covey.run.preflight.subject import NUM_SAMPLES, PreflightContext
from covey.types import Group, Rollout

SECONDS = 2.5
"""Of one check that compares with transformers or between layouts: there are three, and all take ten seconds at most
with what else is measured."""
MIN_COMPLETION = 8
"""Tokens of a completion that are compared at least."""
MIN_PROMPT = 16
"""Tokens of a prompt before a completion whose gradient is compared, at least: the gradient knows no text."""
MIN_GROUPS = 2
"""Prompts that are compared at least: rollouts of one must not see those of another."""


def affordable_tokens(subject: PreflightContext, num_forwards: float) -> int:
    """Count the tokens that `num_forwards` passes take `SECONDS` for. A backward pass counts as two forward passes."""
    return int(SECONDS / (num_forwards * subject.token_seconds))


def shortened(
    groups: Sequence[Group], num_tokens: int, num_rollouts: int = NUM_SAMPLES, *, cuts_prompts: bool = False
) -> list[Group]:
    """Return groups of about `num_tokens` tokens in all: the given ones, or else the shortest with completions cut.

    Of these each has `num_rollouts`, since a pass through a large model has its price however short. Prompts stay
    whole, unless they may be cut to their end, after which what the sampler said holds no longer; and so do the fills
    of a masked policy, whose log-probs depend on every token. Those come first in which some token was uncertain: where
    the nucleus holds a single token everywhere, log-probs and gradients are 0.
    """
    if tokens_of(groups) <= num_tokens:
        return list(groups)
    shortest = sorted(groups, key=lambda group: (not uncertain(group), tokens_of([group])))[:MIN_GROUPS]
    trained = [[rollout for rollout in group.rollouts if any(rollout.loss_mask)] for group in shortest]
    chosen = [sorted(own, key=lambda rollout: not any(rollout.sampler_logprobs))[:num_rollouts] for own in trained]
    share = num_tokens // max(1, sum(map(len, chosen)))
    return [
        replace(group, rollouts=tuple(_cut(rollout, share, cuts_prompts) for rollout in rollouts))
        for group, rollouts in zip(shortest, chosen, strict=True)
    ]


def uncertain(group: Group) -> bool:
    """Return whether the sampler had a choice anywhere in the group; where it had none, gradients are 0."""
    return any(any(rollout.sampler_logprobs) for rollout in group.rollouts)


def tokens_of(groups: Sequence[Group]) -> int:
    """Count the tokens that the rollouts read."""
    return sum(len(rollout.input_ids) for group in groups for rollout in group.rollouts)


def _cut(rollout: Rollout, length: int, cuts_prompt: bool) -> Rollout:
    """Return the first `length` tokens of a rollout, or those around where its completion begins."""
    if rollout.input_length is not None or rollout.branches:
        return rollout
    first = rollout.loss_mask.index(True)
    start = max(0, first + 1 - max(MIN_PROMPT, length - MIN_COMPLETION)) if cuts_prompt else 0
    kept = slice(start, max(start + length, first + MIN_COMPLETION))
    return replace(
        rollout,
        input_ids=rollout.input_ids[kept],
        target_ids=rollout.target_ids[kept],
        loss_mask=rollout.loss_mask[kept],
        sampler_logprobs=rollout.sampler_logprobs[kept],
        turns=(),
    )
