"""The tokens that a check can afford in a few seconds.

A large policy on a slow machine is compared on fewer and shorter completions, never on none: leaks of layouts and wrong
kernels show at the first tokens, and the longest sequence is checked without a gradient.
"""

from collections.abc import Sequence
from dataclasses import replace

from covey.types import Group, Rollout
from covey_preflight.subject import NUM_SAMPLES, PreflightContext

SECONDS = 1.5
"""Seconds of each of three checks that compare with transformers or between layouts."""
MIN_COMPLETION = 8
"""Tokens of a completion that are compared at least."""
MIN_PROMPT = 16
"""Tokens of a prompt before a completion whose gradient is compared, at least: the gradient knows no text."""
MIN_GROUPS = 2
"""Prompts that are compared at least: rollouts of one must not see those of another."""


def affordable_tokens(subject: PreflightContext, num_forwards: float) -> int:
    """Count the tokens that `num_forwards` passes take `SECONDS` for. A backward pass counts as two."""
    return int(SECONDS / (num_forwards * subject.token_seconds))


def shorten_groups(
    groups: Sequence[Group], num_tokens: int, num_rollouts: int = NUM_SAMPLES, *, cuts_prompts: bool = False
) -> list[Group]:
    """Return groups of about `num_tokens` tokens, completions cut if necessary.

    Each has `num_rollouts`. Prompts stay whole, unless `cuts_prompts`, which invalidates the sampler's log-probs; fills
    of a masked policy stay whole. Groups with uncertain tokens come first: where a nucleus holds a single token,
    log-probs and gradients are 0.
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


def begin_with_text(groups: Sequence[Group], token_ids: Sequence[int]) -> list[Group]:
    """Return groups whose causal sequences begin with the tokens of a text.

    A word that no text begins with may get activations a thousand times the others', and then half precision keeps no
    digit of a gradient.
    """
    return [replace(g, rollouts=tuple(_begin_with(tuple(token_ids), r) for r in g.rollouts)) for g in groups]


def _begin_with(text: tuple[int, ...], rollout: Rollout) -> Rollout:
    if rollout.input_length is not None or rollout.branches:
        return rollout
    return replace(
        rollout,
        input_ids=text + rollout.input_ids,
        target_ids=(*text[1:], rollout.input_ids[0], *rollout.target_ids),
        loss_mask=(False,) * len(text) + rollout.loss_mask,
        sampler_logprobs=(0.0,) * len(text) + rollout.sampler_logprobs,
        turns=(),
    )


def uncertain(group: Group) -> bool:
    """Return True if the sampler had a choice anywhere in the group."""
    return any(any(rollout.sampler_logprobs) for rollout in group.rollouts)


def tokens_of(groups: Sequence[Group]) -> int:
    """Count the tokens that the rollouts read."""
    return sum(len(rollout.input_ids) for group in groups for rollout in group.rollouts)


def _cut(rollout: Rollout, length: int, cuts_prompt: bool) -> Rollout:
    """Return the first tokens of a rollout, or those around its completion."""
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
