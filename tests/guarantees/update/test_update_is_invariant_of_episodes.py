"""Promise 1, of episodes: as one row, as branches and as a tree of what they share they make the same update.

What the environment says is read and nothing more: it is in no loss, no count and no metric.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from covey.algorithm.settings import AlgorithmConfig
from covey.policy.logprobs import Scoring
from covey.policy.plain import plain_model, rollout_logprobs
from covey.trainer import layouts
from covey.types import Rollout

from ...support.builders import copied, logprobs, make
from .episodes import advantages_of_turns, as_branches, changed, episode_groups, rewritten
from .test_update_is_invariant import EXACT, FLOAT32, holds
from .updates import (
    EVERYTHING_ON,
    SAMPLING,
    WHOLE,
    Distance,
    How,
    UpdateCase,
    batch_of,
    distance,
    farthest,
    make_case,
    one_update,
    policy_of,
    trainer_of,
)

WAYS = [
    How("shared"),
    How("packed"),
    How("shared", 100, chunk=7),
    How("shared", 1, checkpointing=True),
    How("packed", 90),
    How("padded", 150, order=(1, 0)),
]
SEQUENCES = AlgorithmConfig(loss="clip", ratio="sequence_mean", aggregation="seq_mean_token_mean", kl_coef=0.1)
"""Ratios and means of whole episodes, whatever their branches."""
PLACES = [
    ("gpt2", torch.float64, EXACT, 0),
    ("gpt2", torch.float64, EXACT, 4),
    ("qwen3", torch.float32, FLOAT32, 0),
    ("mistral", torch.float32, FLOAT32, 0),
]
"""The last has a window; with and without adapters."""


def case_of(
    algorithm: AlgorithmConfig = EVERYTHING_ON, place: tuple[str, torch.dtype, float, int] = PLACES[0]
) -> UpdateCase:
    """Episodes with an advantage for each turn."""
    groups = episode_groups()
    architecture, dtype, _, lora_rank = place
    worth = advantages_of_turns(groups)
    return make_case(architecture, dtype, algorithm, groups, lora_rank=lora_rank, advantages=worth)


def branched(case: UpdateCase) -> UpdateCase:
    return replace(case, groups=tuple(changed(case.groups, as_branches)))


def agrees(found: Distance, tolerance: float) -> None:
    """A metric is the exponential of a sum over 50 tokens, which float32 knows to five digits less one."""
    holds(replace(found, metric=found.metric / (1 if tolerance == EXACT else 10)), tolerance)


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}-{place[3]}")
@pytest.mark.parametrize("algorithm", [EVERYTHING_ON, SEQUENCES], ids=["tokens", "sequences"])
def test_an_episode_as_row_branches_or_tree_makes_the_same_update(
    place: tuple[str, torch.dtype, float, int], algorithm: AlgorithmConfig
) -> None:
    case = case_of(algorithm, place)
    expected, ways = one_update(case, WHOLE), WAYS if place is PLACES[0] else WAYS[:3]
    for one in (case, branched(case)):
        for how in (WHOLE, *ways):
            agrees(distance(one_update(one, how), expected), place[2])


@pytest.mark.long
@pytest.mark.parametrize("attention", ["compiled", "varlen"])
def test_other_attentions_make_the_same_update_of_trees(attention: str) -> None:
    """The kernels in C take flat trees, the torch way takes the deeper ones."""
    case = case_of(place=PLACES[2])
    expected = one_update(case, WHOLE)
    for one in (case, branched(case)):
        for how in (How("shared", 10_000), How("shared", 100, chunk=7), How("packed", 90)):
            agrees(distance(one_update(one, replace(how, attention=attention)), expected), FLOAT32)


@pytest.mark.long
def test_episodes_whose_history_was_rewritten_make_the_same_update_in_any_way() -> None:
    episodes = changed(episode_groups(), rewritten)
    case = make_case(algorithm=SEQUENCES, groups=episodes, advantages=advantages_of_turns(episodes))
    holds(farthest(case, WAYS), EXACT)
    assert len({rollout.branches for group in episodes for rollout in group.rollouts}) == 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("least", [1, 2, 5])
def test_a_tree_of_any_shared_prefixes_makes_the_same_update(
    seed: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where chance agreement of a few tokens is split off."""
    monkeypatch.setattr(layouts, "MIN_SHARED", least)
    groups = episode_groups(seed)
    mixed = [*changed(groups[:1], as_branches), *changed(groups[1:], rewritten)]
    case = make_case(algorithm=SEQUENCES, groups=mixed, advantages=advantages_of_turns(groups))
    holds(farthest(case, [How("shared"), How("shared", 60)]), EXACT)


@pytest.mark.parametrize(
    "change", [lambda rollout: rollout, as_branches, rewritten], ids=["row", "branches", "rewritten"]
)
def test_log_probs_of_every_turn_equal_a_plain_pass(change: object) -> None:
    policy, groups = policy_of("gpt2", torch.float64, 0), changed(episode_groups(), change)
    plain = plain_model(policy)
    expected = torch.cat([rollout_logprobs(plain, r, SAMPLING) for g in groups for r in g.rollouts]).detach()
    assert len(expected) == sum(rollout.turns[-1].end for group in groups for rollout in group.rollouts)
    for packing, budget in (("shared", 10_000), ("shared", 100), ("packed", 10_000), ("padded", 150)):
        found = logprobs(policy, make(groups, packing, budget).micro_batches, Scoring(SAMPLING, 0))
        assert float((found - expected).abs().max()) < 1e-9


# ------------------------------------------------------------------------------------- what is shared, and counted


def num_read(case: UpdateCase, how: How) -> list[int]:
    return [micro_batch.input_ids_BT.numel() for micro_batch in batch_of(case, how).micro_batches]


def test_what_episodes_and_branches_share_is_read_once() -> None:
    case = case_of()
    rows, branches = ([len(rollout.input_ids) for group in one.groups for rollout in group.rollouts]
                      for one in (case, branched(case)))  # fmt: skip
    assert (
        sum(num_read(case, How("packed"))) == sum(rows) < sum(branches) == sum(num_read(branched(case), How("packed")))
    )
    # Two prompts of 6 and 9 tokens are shared, and the 40 tokens of a first turn.
    assert sum(num_read(case, How("shared"))) == sum(rows) - 2 * 6 - 9 - 40
    # Branches cost what a tree of at least 32 tokens leaves: what is shorter is read again.
    assert sum(num_read(branched(case), How("shared"))) < sum(rows)


def test_only_a_single_whole_episode_may_exceed_the_micro_batch_budget() -> None:
    case = branched(case_of())
    for budget in (1, 70, 120, 200):
        for packing in ("shared", "packed", "padded"):
            batch = batch_of(case, How(packing, budget))
            assert sum(micro_batch.num_rows for micro_batch in batch.micro_batches) == batch.num_sequences == 5
            for micro_batch in batch.micro_batches:
                assert micro_batch.input_ids_BT.numel() <= budget or micro_batch.num_rows == 1
    fewest = [len(num_read(case, How(packing, 200))) for packing in ("shared", "packed", "padded")]
    assert fewest == sorted(fewest)


def test_a_branched_episode_counts_as_one_sequence() -> None:
    one, other = batch_of(case_of(), WHOLE), batch_of(branched(case_of()), How("shared"))
    for name in ("num_loss_tokens", "num_sequences", "num_rollouts"):
        assert getattr(one, name) == getattr(other, name)
    rows = [part.row_L.tolist() for part in (one.micro_batches[0], other.micro_batches[0])]
    assert rows[0] == rows[1]
    assert all(b in (a, a + 1) for a, b in pairwise(rows[0]))


# ------------------------------------------------------------------------------------- the environment's tokens


def heard(rollout: Rollout) -> Rollout:
    """With other log-probs, and other targets, wherever the environment spoke."""
    pairs = zip(rollout.target_ids, rollout.sampler_logprobs, rollout.loss_mask, strict=True)
    found = [(target, logprob) if own else (17, -99.0) for target, logprob, own in pairs]
    targets, values = zip(*found, strict=True)
    return replace(rollout, target_ids=targets, sampler_logprobs=values)


@pytest.mark.parametrize("change", [lambda rollout: rollout, as_branches], ids=["row", "branches"])
def test_log_probs_at_what_the_environment_says_change_no_gradient_and_no_metric(change: object) -> None:
    case = case_of()
    case = replace(case, groups=tuple(changed(case.groups, change)))
    other = replace(case, groups=tuple(changed(case.groups, heard)))
    for how in (WHOLE, How("shared", 100)):
        one, two = one_update(case, how), one_update(other, how)
        assert torch.equal(one.gradient, two.gradient)
        assert one.metrics == two.metrics


@pytest.mark.parametrize("packing", ["shared", "packed"])
def test_the_gradient_of_logits_is_exactly_0_where_the_environment_speaks(packing: str) -> None:
    """Behind the last norm nothing but the logits reads a position."""
    case = replace(branched(case_of(AlgorithmConfig(loss="reinforce"))), num_updates=1)
    policy, seen = copied(policy_of("gpt2", torch.float64, 0)), list[torch.Tensor]()

    def keep(norm: nn.Module, given: object, out: torch.Tensor) -> None:
        out.retain_grad()
        seen.append(out)

    policy.causal_lm.base_model.ln_f.register_forward_hook(keep)
    batch = batch_of(case, How(packing))
    trainer_of(case, policy, How(packing)).step(batch, 0)
    (norm_1TD,), (micro_batch,) = seen, batch.micro_batches
    assert norm_1TD.grad is not None
    learnt = norm_1TD.grad[0].ne(0).any(dim=-1).nonzero()[:, 0].tolist()
    assert learnt == sorted(set(micro_batch.source_L.tolist()))
    assert len(learnt) < micro_batch.input_ids_BT.numel()
