"""Compare engine and trainer with the model in plain transformers (`policy.plain`).

The other checks compare covey with covey: errors shared by engine, trainer and layouts go undetected.

Shapes: L loss tokens.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.engine.base import Engine, EngineStats
from covey.policy import sharding
from covey.policy.plain import plain_model, rollout_logprobs, rounded_and_exact
from covey.rollouts.rollout import causal_rollout
from covey.system import collectives
from covey.types import Completion, Group, Prompt, Reward, Rollout, Sampling
from covey_preflight.budget import affordable_tokens, shorten_groups
from covey_preflight.policy import allowed_nats, first_groups, laid_out, synthetic_rows, trainer_logprobs
from covey_preflight.rounding import explained_logprobs
from covey_preflight.subject import Check, PreflightContext, Unscored

WORK = {"cpu": 1e11, "cuda": 5e13}
"""Most floating-point operations of one pass over the longest sequence, about a second."""
ROOM = 0.25
"""Share of the free memory that its attention scores may take, which plain attention holds whole."""
SCORE_WORK = 60
"""Operations that an attention score costs, in all its passes through memory."""
SCORE_BYTES = 12
"""An attention score, its exponential and its share, in float32."""
FARTHER = 1.5
"""Multiple of the sampled lengths from which a sequence shorter than the longest of the run is worth its passes."""
NUM_SAMPLED = 8
"""Tokens that the engine continues the longest sequence by."""
NUM_SPREAD = 32
"""Tokens of it that the trainer is asked for besides, evenly spaced."""
NUM_GROUPS = 2
NUM_FORWARDS = 4
"""Forward passes that a look is worth: one each of engine, trainer and transformers, and work around them."""


@dataclass
class Lengthened:
    """An engine that continues from `longer` instead of `prompt_ids`."""

    engine: Engine
    prompt_ids: Sequence[int]
    longer: Sequence[int]

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        given = self.longer if list(prompt_ids) == list(self.prompt_ids) else prompt_ids
        return await self.engine.generate(given, n, sampling)

    def load_weights(self, version: int) -> None:
        self.engine.load_weights(version)

    def take_stats(self) -> EngineStats:
        return self.engine.take_stats()


@dataclass(frozen=True, slots=True)
class Look:
    """Rollouts to compare together, and the longest one's tokens."""

    name: str
    groups: list[Group]
    num_tokens: int


def check_plain(subject: PreflightContext) -> Check:
    """Check engine and trainer against transformers, at short and full length."""
    num_tokens = affordable_tokens(subject, NUM_FORWARDS)
    short = shorten_groups(first_groups(subject.groups)[:NUM_GROUPS], num_tokens, num_rollouts=1)
    looks = [Look("short", short, _longest(short)), *_at_full_length(subject)]
    gaps = _gaps_of(subject, looks)
    rollouts = [rollout for look in looks for group in look.groups for rollout in group.rollouts]
    rollouts = [rollout for rollout in rollouts if rollout.num_loss_tokens]
    wrong, limit = explained_logprobs(subject, gaps, rollouts)
    may_round = not (subject.run.policy.computes_whole or subject.config.preflight.logprob_tolerance)
    if may_round and any(collectives.all_gather(bool(wrong))):
        # Where transformers rounds as much, its log-probs in the run's own precision are the measure
        alike = _gaps_of(subject, looks, rounded=True)
        if not any(collectives.all_gather(bool(explained_logprobs(subject, alike, rollouts)[0]))):
            gaps, wrong = alike, []
    means = {name: float(gap_L.mean()) for name, gap_L in gaps.items()}
    largest = {name: float(gap_L.max()) for name, gap_L in gaps.items()}
    # A NaN is the worst of all, which max() alone would not see.
    worst = max(wrong or gaps, key=lambda name: (largest[name] != largest[name], largest[name]))
    lengths = {look.name: look.num_tokens for look in looks}
    who, name = worst.split("/")
    figure = (
        f"the {who} differs from transformers alone by {largest[worst]:.2g} nats at most, {means[worst]:.2g} on "
        f"average of {len(gaps[worst])} tokens, in sequences of up to {lengths[name]:,}{_reach(subject, looks)}"
    )
    remedy = (
        "covey computes something else than this architecture does: model.kernels=torch or model.attention=sdpa may "
        "be right, model.precision=float32 tells rounding from a defect, and preflight.logprob_tolerance accepts a "
        "known difference"
    )
    values = largest | {f"{name}/mean": mean for name, mean in means.items()}
    values |= {f"tokens/{look.name}": float(look.num_tokens) for look in looks}
    return Check(not wrong, figure, allowed_nats(limit), remedy if wrong else "", values)


def _gaps_of(subject: PreflightContext, looks: Sequence[Look], *, rounded: bool = False) -> dict[str, Tensor]:
    found = [(look.name, _gaps(subject, look.groups, rounded)) for look in looks]
    return {f"{who}/{name}": gap_L for name, gaps in found for who, gap_L in gaps.items()}


def _gaps(subject: PreflightContext, groups: Sequence[Group], rounded: bool) -> dict[str, Tensor]:
    """Return the gaps of engine and trainer to transformers, in nats.

    For the engine, only sampled tokens count. With `rounded` transformers computes in the run's precision.
    """
    config, run, policy = subject.config, subject.run, subject.run.policy
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.num_loss_tokens > 0]
    with torch.no_grad(), sharding.gather_weights(policy):
        plain = rounded_and_exact(policy)[0] if rounded else plain_model(policy)
        expected_L = torch.cat([rollout_logprobs(plain, rollout, run.source.sampling) for rollout in rollouts])
    batch = laid_out(subject, synthetic_rows(groups, 1.0), config.packing, config.micro_batch_tokens)
    found = {"trainer": (trainer_logprobs(subject, batch).double() - expected_L.double()).abs()}
    # Take what the engine said of its own samples
    sampled_L = torch.cat([m.sampler_logprob_L for m in batch.micro_batches])
    if config.engine.name != "fake" and bool((sampled_L != UNKNOWN).any()):
        found["engine"] = (sampled_L - expected_L.double()).abs()[sampled_L != UNKNOWN]
    return found


UNKNOWN = 1.0
"""Stands where the engine gave no log-prob: it drew only the last tokens of a long completion."""


def _at_full_length(subject: PreflightContext) -> list[Look]:
    """Sample the longest prompt and completion, beside a short one.

    Nothing where short ones already have that length.
    """
    # A fill has no length of its own
    policy, config = subject.run.policy, subject.config
    prompt, prompt_ids = subject.longest
    if policy.mask_id is not None:  # a fill is as long as its input
        groups = _sample(subject, [prompt], config.sampling.max_tokens, lambda engine: engine)
        return [Look("long", groups, len(prompt_ids))]
    # Look only where the run reaches beyond what was sampled already
    needed, reachable, num_sampled = _needed_tokens(subject), reachable_tokens(subject), NUM_SAMPLED
    num_tokens, seen = min(needed, reachable), _longest(subject.groups)
    if num_tokens <= seen + num_sampled or reachable < min(needed, FARTHER * seen):
        return []
    # Continue the longest prompt with text until a few tokens before the end, and sample these
    longer = _extend_prompt(subject, num_tokens - num_sampled)
    start = min(len(prompt_ids), len(longer) - 1)
    # Games begin with one text for all seeds, of which each would be lengthened
    beside = [p for p in subject.prompts if p.text != prompt.text][:1]
    groups = _sample(subject, [prompt, *beside], num_sampled, lambda engine: Lengthened(engine, prompt_ids, longer))
    rollouts = tuple(_spread(_cut_prefix(longer, start, rollout), num_sampled) for rollout in groups[0].rollouts)
    return [Look("long", [replace(groups[0], rollouts=rollouts), *groups[1:]], len(longer) + num_sampled)]


def _sample(
    subject: PreflightContext, prompts: Sequence[Prompt], max_tokens: int, through: Callable[[Engine], Engine]
) -> list[Group]:
    """Sample one completion per prompt at the same time, unjudged."""
    source = subject.run.local
    sampler = replace(source.sampler, environment=Unscored(), engine=through(source.sampler.engine))
    with sharding.gather_weights(subject.run.policy):  # ranks sample on their own
        return replace(source, sampler=sampler).run(prompts, 1, replace(source.sampling, max_tokens=max_tokens))


def _extend_prompt(subject: PreflightContext, length: int) -> list[int]:
    """Extend the longest prompt by other tokens, up to the limit."""
    prompt_ids = subject.longest[1]
    known = sorted({*prompt_ids, *(i for group in subject.groups for r in group.rollouts for i in r.target_ids)})
    chance = random.Random("preflight")
    return [*prompt_ids, *(chance.choice(known) for _ in range(length - len(prompt_ids)))][:length]


def _cut_prefix(longer: Sequence[int], start: int, rollout: Rollout) -> Rollout:
    """Return the engine's tokens after `longer`, as a completion from `start`."""
    places = [place for place, chosen in enumerate(rollout.loss_mask) if chosen]
    token_ids = (*longer[start:], *(rollout.target_ids[place] for place in places))
    logprobs = (*[UNKNOWN] * (len(longer) - start), *(rollout.sampler_logprobs[place] for place in places))
    completion = Completion(token_ids, logprobs, rollout.finish_reason, rollout.policy_version)
    return causal_rollout(longer[:start], completion, Reward(0.0, {}), "")


def _spread(rollout: Rollout, num_sampled: int) -> Rollout:
    """Return the rollout with few loss tokens: first, some, and last."""
    places = [place for place, chosen in enumerate(rollout.loss_mask) if chosen]
    kept = {*places[:: max(1, len(places) // NUM_SPREAD)], *places[-num_sampled:]}
    mask = tuple(place in kept for place in range(len(rollout.loss_mask)))
    logprobs = tuple(p if own else 0.0 for p, own in zip(rollout.sampler_logprobs, mask, strict=True))
    return replace(rollout, loss_mask=mask, sampler_logprobs=logprobs, turns=())


def _needed_tokens(subject: PreflightContext) -> int:
    """Count the tokens of the longest sequence that the run can reach."""
    num_tokens = len(subject.longest[1])
    return subject.run.policy.num_positions(num_tokens, max(1, subject.run.source.sampling.room(num_tokens)))


def reachable_tokens(subject: PreflightContext) -> int:
    """Return the longest sequence affordable for plain attention, on every rank."""
    policy = subject.run.policy
    shape, kind = policy.causal_lm.config.get_text_config(decoder=True), policy.device.type
    num_layers = max(1, len(sharding.layers_of(policy.causal_lm)))  # BLT's configuration does not say
    num_heads = int(getattr(shape, "num_attention_heads", 1))
    # Operations: linear ones, two a weight, and quadratic ones, mostly to move a score that is held whole.
    linear = 2.0 * sum(weight.numel() for weight in policy.causal_lm.parameters())
    quadratic = float(SCORE_WORK * num_heads * num_layers)
    work = WORK.get(kind, WORK["cpu"])
    by_time = (math.sqrt(linear**2 + 4 * quadratic * work) - linear) / (2 * quadratic)
    by_room = math.sqrt(ROOM * subject.available(policy.device) / (SCORE_BYTES * num_heads))
    by_clock = affordable_tokens(subject, NUM_FORWARDS)
    return -collectives.all_max_int(-int(min(by_time, by_room, by_clock)))


def _longest(groups: Sequence[Group]) -> int:
    """Count the longest sequence's tokens, an input's for masked policies."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sequences = [(end - start, r.input_length is None) for r in rollouts for start, end in r.sequences]
    return max((length + is_shifted for length, is_shifted in sequences), default=0)


def _reach(subject: PreflightContext, looks: Sequence[Look]) -> str:
    needed, seen = _needed_tokens(subject), max(look.num_tokens for look in looks)
    return f" (the run may come to {needed:,}, which would take too long)" if needed > seen else ""
