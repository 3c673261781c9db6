"""A run that is resumed under another bound keeps it, and still trains every prompt that was admitted, once."""

from itertools import count

import pytest

from covey.policy.policy import Policy
from covey.rollouts.buffer import Bound
from covey.rollouts.stream import PromptStream

from .faulty import Plan, training

NUM_STEPS = 5
CHANGES = {
    "less stale": (Bound(4, 2), Bound(4, 0)),
    "fewer groups a step": (Bound(4, 2), Bound(3, 2)),
    "published more often": (Bound(4, 1, 2), Bound(4, 1, 1)),
    "published more often, not stale": (Bound(4, 2, 3), Bound(2, 0, 1)),
    "more stale": (Bound(4, 0), Bound(4, 2)),
    "more groups a step": (Bound(4, 2), Bound(8, 1)),
    "published less often": (Bound(4, 2), Bound(4, 1, 2)),
}


@pytest.mark.parametrize("are_finished", [True, False], ids=["finished", "under way"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_resumed_under_another_bound_keeps_it_and_loses_nothing(
    policy: Policy, change: str, are_finished: bool
) -> None:
    before, after = CHANGES[change]
    with training(policy, bound=before) as run:
        run.advance(NUM_STEPS)
        if are_finished:
            run.wait_until(lambda: not run.source._buffer.waiting)
        saved, trained = run.source.state_dict(), run.trained
    with training(policy, bound=after) as resumed:
        resumed.step, resumed.trained = NUM_STEPS, trained
        resumed.source.load_state_dict(saved)
        resumed.source.publish(NUM_STEPS)
        resumed.advance(18)
        assert not resumed.source._unsent


def test_a_run_sampled_in_process_resumes_with_ray_samplers(policy: Policy) -> None:
    with training(policy) as run:
        run.source.load_state_dict({"position": 8})
        run.source.publish(2)
        run.step = 2
        run.take()
        assert run.trained == [prompt.id for prompt, _ in PromptStream(run.source.stream.prompts, 0, True).draw(12)[8:]]
        assert run.ages == [0] * 8


def test_held_out_prompts_do_not_wait_behind_prompts_that_wait_for_later_weights(policy: Policy) -> None:
    with training(policy, bound=Bound(4, 2)) as run:
        run.advance(NUM_STEPS)
        saved = run.source.state_dict() | {}
        saved["buffer"]["finished"] = {}
    with training(policy, Plan(), bound=Bound(4, 0), samplers=1, groups_per_sampler=4) as resumed:
        resumed.source.load_state_dict(saved)
        resumed.source.publish(NUM_STEPS)
        resumed.wait_until(lambda: len(resumed.source._buffer.finished) == 4)
        prompts = resumed.source.stream.prompts[:2]
        groups = resumed.source.run(prompts, 1, resumed.source.sampling)
        assert [group.prompt.id for group in groups] == [prompt.id for prompt in prompts]


def test_a_round_for_refused_groups_takes_prompts_that_wait_for_later_weights(policy: Policy) -> None:
    with training(policy, bound=Bound(4, 2)) as run:
        run.advance(NUM_STEPS)
        saved = run.source.state_dict()
        saved["buffer"]["finished"] = {}
    with training(policy, bound=Bound(4, 0)) as resumed:
        source = resumed.source
        source.load_state_dict(saved)
        judged = count()
        source.local.keep = lambda rewards: next(judged) != 1
        source.local.filter_rounds = 2
        source.publish(NUM_STEPS)
        first = [ticket.prompt.id for ticket in source._buffer.pending[:5]]
        assert len(source._unsent) == 8
        for version in (NUM_STEPS, NUM_STEPS + 1):
            groups = source.take(4)
            assert {rollout.policy_version for group in groups for rollout in group.rollouts} == {version}
            assert version > NUM_STEPS or [group.prompt.id for group in groups] == [first[0], *first[2:]]
            source.publish(version + 1)
