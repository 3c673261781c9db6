"""Measuring a policy: intervals, pass@k, pairing, and what a missing score does."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.algorithm.intervals import SHARE, bounds_of, mean_interval, pass_at_k, student, wilson
from covey.config.schema import EvaluationConfig
from covey.engine.native.engine import NativeEngine
from covey.loop import train
from covey.policy.models.loading import load_policy
from covey.rollouts.sampler import Sampler
from covey.rollouts.source import LocalSource
from covey.rollouts.stream import PromptStream
from covey.run import stages
from covey.run.evaluate import Answers as Answered
from covey.run.evaluate import Estimate, Evaluation, evaluate, noise
from covey.run.records.summary import gains, paired_gain
from covey.run.stages import is_best
from covey.types import Failure, Group, Prompt, Reward, Sampling, Turn
from covey_trl.callbacks import evaluation_metrics

from ..support.small import rollout, scripted, small_config, use

PROMPTS = [Prompt(f"test-{index}", "arithmetic", "?", {}) for index in range(4)]
Answer = Callable[[int, bool], Sequence[float | None]]


@dataclass
class Answers:
    """A source whose rewards a test says: (prompt index, greedy) -> rewards, None for a failure."""

    answer: Answer
    asked: list[tuple[int, Sampling]] = field(default_factory=list)

    def run(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
        self.asked.append((group_size, sampling))
        made = []
        for index, prompt in enumerate(prompts):
            rewards = self.answer(index, sampling.temperature == 0)
            assert len(rewards) == group_size
            failures = (Failure("lost"),) * sum(r is None for r in rewards)
            made.append(Group(prompt, tuple(rollout(r) for r in rewards if r is not None), failures))
        return made

    def take(self, n: int, meanwhile: Any = None) -> list[Group]:
        raise AssertionError("an evaluation takes nothing from the training stream")

    def publish(self, version: int) -> None:
        raise AssertionError("an evaluation publishes nothing")

    def take_drops(self) -> dict[str, int]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return


def look(answer: Answer, **settings: Any) -> Evaluation:
    asked = EvaluationConfig(**{"num_samples": 4, "k": [1, 2, 4], **settings})
    return evaluate(Answers(answer), PROMPTS, Sampling(), asked)


def rounded(estimate: Estimate, digits: int = 4) -> tuple[float, ...]:
    return tuple(round(x, digits) for x in (estimate.value, estimate.low, estimate.high))


# ------------------------------------------------------------------------------------------------ intervals


def test_wilson_intervals_are_the_published_ones() -> None:
    """Newcombe, Statistics in Medicine 17:857 (1998), Table I, method 3."""
    assert rounded(wilson(81, 263, 0.95))[1:] == (0.2553, 0.3662)
    assert rounded(wilson(15, 148, 0.95))[1:] == (0.0624, 0.1605)
    assert rounded(wilson(0, 20, 0.95))[1:] == (0.0, 0.1611)
    assert rounded(wilson(1, 29, 0.95))[1:] == (0.0061, 0.1718)


def test_a_higher_confidence_makes_a_wider_interval() -> None:
    assert wilson(5, 10, 0.99).high > wilson(5, 10, 0.95).high > wilson(5, 10, 0.5).high > 0.5


def test_rewards_between_0_and_1_alone_have_the_bounds_of_shares() -> None:
    assert bounds_of([0.0, 0.5, 1.0]) == (0.0, 1.0)
    assert [bounds_of([0.5, other]) for other in (1.01, -0.01, math.nan)] == [None] * 3


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (19, 2.0930)])
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student(0.95, freedom) == pytest.approx(quantile, rel=2e-3)  # the series ends with the fourth power
    assert student(0.99, 1e6) == pytest.approx(2.5758, rel=1e-4)


def test_the_interval_of_a_mean_is_students_with_pseudo_values_at_the_bounds() -> None:
    # Centre (4 x 0.25 + 0.5) / 5 = 0.3; squares 4 x 0.05^2 + (0.3^2 + 0.7^2) / 2 = 0.3; t(4) = 2.7764.
    half = 2.7764 * math.sqrt(0.3) / 5
    found = mean_interval([0.25] * 4, 0.95, SHARE)
    assert (found.value, found.low, found.high) == (0.25, 0.0, pytest.approx(0.3 + half, rel=1e-3))
    assert rounded(mean_interval([3.0, 1.0] * 10, 0.95), 2) == (2.0, 1.52, 2.48)  # 2 +- 2.093 x 1.026 / sqrt(20)


def drawn(kind: str, number: int, draw: random.Random) -> list[float]:
    """Mean rewards of so many prompts, four samples each, or pass@4 of eight at a success rate of 70 %."""
    if kind == "normal":
        return [draw.gauss(3.0, 2.0) for _ in range(number)]
    if kind == "pass@4":
        right = [sum(draw.random() < 0.7 for _ in range(8)) for _ in range(number)]
        return [pass_at_k(8, count, 4) for count in right]
    found = []
    for _ in range(number):
        rate = {"seldom": 0.02, "nearly always": 0.98}.get(kind) or draw.betavariate(0.5, 0.5)
        found.append(sum(draw.random() < rate for _ in range(4)) / 4)
    return found


@pytest.mark.parametrize("number", [1, 2, 5, 20, 64, 256])
@pytest.mark.parametrize(
    ("kind", "truth"),
    [("mixed", 0.5), ("seldom", 0.02), ("nearly always", 0.98), ("pass@4", 1 - 0.3**4), ("normal", 3.0)],
)
def test_intervals_hold_the_truth_as_often_as_they_say(kind: str, truth: float, number: int) -> None:
    """Of 2,000 at 95 % in 95 ± 1 % by chance; at least 93 are asked for, and no interval is a point."""
    draw = random.Random(f"{kind} {number}")
    times = 2000 if number <= 64 else 600
    bounds = None if kind == "normal" else SHARE
    found = [mean_interval(drawn(kind, number, draw), 0.95, bounds) for _ in range(times)]
    if bounds is None and number < 20:
        assert all(math.isnan(one.low) and math.isnan(one.high) for one in found)
        return
    assert all(one.low < one.high and one.low <= one.value <= one.high for one in found)
    assert all(one.low >= 0 and one.high <= 1 for one in found) or kind == "normal"
    assert sum(one.low <= truth <= one.high for one in found) >= 0.93 * times


@pytest.mark.parametrize("number", [1, 2, 5, 20, 64])
@pytest.mark.parametrize("after", [0.5, 0.52, 0.9])
def test_intervals_of_gains_hold_the_truth_as_often_as_they_say(number: int, after: float) -> None:
    draw = random.Random(number)
    held = 0
    for _ in range(1000):
        luck = [draw.random() for _ in range(number)]
        gain = paired_gain([float(x < 0.5) for x in luck], [float(x < after) for x in luck], 0.95)
        assert gain.low < gain.high
        held += gain.low - 1e-12 <= after - 0.5 <= gain.high + 1e-12
    assert held >= 930


def test_nothing_measured_is_not_a_number_instead_of_0() -> None:
    for estimate in (wilson(0, 0, 0.95), mean_interval([], 0.95), mean_interval([], 0.95, SHARE)):
        assert all(math.isnan(x) for x in (estimate.value, estimate.low, estimate.high))


# ------------------------------------------------------------------------------------------------ an evaluation


def some_right(index: int, greedy: bool) -> Sequence[float]:
    """Greedily right on prompts 0 and 1; of 4 samples 4, 2, 1 and 0 are right."""
    return [float(index < 2)] if greedy else [1.0] * (4, 2, 1, 0)[index] + [0.5] * (0, 2, 3, 4)[index]


def test_accuracy_is_greedy_and_pass_at_k_is_unbiased() -> None:
    found = look(some_right)
    assert rounded(found.accuracy) == (0.5, 0.15, 0.85)
    assert found.pass_at_k[1].value == (1 + 2 / 4 + 1 / 4) / 4
    assert found.pass_at_k[2].value == pytest.approx((1 + 5 / 6 + 1 / 2) / 4)
    assert found.pass_at_k[4].value == 3 / 4
    assert found.correct_greedy == (1.0, 1.0, 0.0, 0.0)
    assert found.mean_reward == (1.0, 0.75, 0.625, 0.5)
    assert found.reward_mean.value == pytest.approx(0.71875)
    assert (found.num_prompts, found.num_samples, found.num_unscored) == (4, 4, 0)


def test_the_level_of_the_intervals_is_a_setting() -> None:
    found = look(some_right, confidence=0.5)
    assert rounded(found.accuracy) == (0.5, 0.3402, 0.6598)
    assert rounded(found.reward_mean) == (0.7188, 0.5784, 0.7716)
    assert rounded(found.pass_at_k[1]) == (0.4375, 0.3175, 0.5825)


def test_what_counts_as_correct_is_a_setting() -> None:
    found = look(some_right, correct_above=0.5)
    assert found.pass_at_k[1].value == 1.0
    assert look(some_right, correct_above=1.01).accuracy.value == 0.0


def test_greedy_completions_are_not_cut_by_the_filters_of_sampling() -> None:
    source = Answers(some_right)
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, max_tokens=9, stop=("\n",), seed=3)
    evaluate(source, PROMPTS, sampling, EvaluationConfig(num_samples=4, k=[1]))
    assert source.asked == [(1, Sampling(temperature=0.0, max_tokens=9, stop=("\n",), seed=3)), (4, sampling)]


def test_two_looks_can_be_paired_prompt_by_prompt() -> None:
    before = look(some_right)
    after = look(lambda index, greedy: [1.0] if greedy else [1.0] * 4)
    found = gains(before, after, 0.95)
    assert found is not None
    assert found["accuracy"]["value"] == 0.5
    assert found["reward_mean"]["value"] == pytest.approx(0.28125)
    assert found["pass_at_k"]["1"]["value"] == 1 - (1 + 2 / 4 + 1 / 4) / 4
    assert found["num_prompts"] == 4
    assert look(some_right, correct_above=0.5).accuracy is not None


def test_rewards_that_do_not_say_what_is_right_have_no_accuracy() -> None:
    others = [replace(prompt, environment="letters") for prompt in PROMPTS]
    settings = EvaluationConfig(num_samples=4, k=[1])
    graded = evaluate(Answers(some_right), others, Sampling(), settings)
    assert (graded.accuracy, graded.pass_at_k) == (None, {})
    assert graded.score == graded.reward_mean.value
    assert all(map(math.isnan, graded.correct_greedy))
    verdicts = evaluate(
        Answers(lambda index, greedy: [1.0] if greedy else [0.0, 1.0] * 2), others, Sampling(), settings
    )
    assert verdicts.accuracy is not None
    assert verdicts.score == verdicts.accuracy.value == 1.0
    assert evaluation_metrics(graded, "eval") == {"eval_reward": 0.71875}
    assert evaluation_metrics(verdicts, "eval") == {"eval_reward": 0.5, "eval_accuracy": 1.0}
    found = gains(graded, verdicts, 0.95)
    assert found is not None
    assert "accuracy" not in found
    assert found["reward_mean"]["value"] == pytest.approx(0.5 - 0.71875)


# ------------------------------------------------------------------------------------------------ missing scores


def one_lost(index: int, greedy: bool) -> Sequence[float | None]:
    """Nothing of prompt 3 could be scored, and one sample of prompt 0."""
    if index == 3:
        return [None] * (1 if greedy else 4)
    return [1.0] if greedy else [1.0, 1.0, 0.0, None if index == 0 else 0.0]


def test_samples_that_could_not_be_scored_are_counted_and_are_no_zeros() -> None:
    found = look(one_lost)
    assert found.num_unscored == 6
    assert found.mean_reward[:3] == (pytest.approx(2 / 3), 0.5, 0.5)
    assert math.isnan(found.mean_reward[3])
    assert found.reward_mean.value == pytest.approx((2 / 3 + 0.5 + 0.5) / 3)
    assert found.pass_at_k[1].value == pytest.approx((2 / 3 + 0.5 + 0.5) / 3)


def test_an_episode_whose_turns_earned_nothing_counts_in_the_means_of_the_parts() -> None:
    @dataclass
    class Episodes(Answers):
        def run(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
            rewards = [Reward(1.5, {"outcome": 1.0, "turns": 0.5}), *[Reward(0.0)] * (group_size - 1)]
            made = [replace(rollout(0.0), reward=reward, turns=(Turn(0, 2),)) for reward in rewards]
            return [Group(prompt, tuple(made), ()) for prompt in prompts]

    found = evaluate(Episodes(some_right), PROMPTS, Sampling(), EvaluationConfig(num_samples=4, k=[1]))
    assert {name: part.value for name, part in found.reward_parts.items()} == {"outcome": 0.25, "turns": 0.125}


def answered(greedy: Sequence[float], sampled: Sequence[Sequence[float]]) -> Answered:
    prompts = [Prompt(str(index), "test", "?", {}) for index in range(len(greedy))]
    groups = [Group(p, (rollout(reward),), ()) for p, reward in zip(prompts, greedy, strict=True)]
    others = [Group(p, tuple(map(rollout, rewards)), ()) for p, rewards in zip(prompts, sampled, strict=True)]
    return Answered(groups, others)


def test_a_temperature_that_makes_noise_is_told_with_both_rewards_and_another_temperature() -> None:
    greedy, sampled = [1.0] * 14 + [0.0] * 66, [(0.0, 0.0)] * 77 + [(0.0, 1.0)] * 3
    said = "greedy answers earn 0.175, samples at temperature 1 earn 0.019: try sampling.temperature=0.7"
    assert noise(answered(greedy, sampled), 1.0) == said
    cooler = noise(answered(greedy, sampled), 0.6)
    assert cooler is not None
    assert cooler.endswith("samples at temperature 0.6 earn 0.019: try sampling.temperature=0.42")
    assert noise(answered(greedy[:15], sampled[:15]), 1.0) is None  # too few prompts to tell
    assert noise(answered([1.0] + [0.0] * 79, sampled), 1.0) is None  # one answer
    assert noise(answered([1.0] * 80, [(1.0, 0.0)] * 80), 1.0) is None  # half of it: samples explore
    assert noise(answered([-0.2] * 80, [(-1.0, -1.0)] * 80), 1.0) is None  # what costs has no multiples


def test_noise_is_seldom_told_of_a_policy_whose_samples_are_worth_its_greedy_answers() -> None:
    draw, told = random.Random(5), 0
    for trial in range(1500):
        chance = (0.05, 0.2, 0.5)[trial % 3]
        one = [float(draw.random() < chance) for _ in range(24)]
        told += noise(answered(one, [[float(draw.random() < chance) for _ in range(2)] for _ in one]), 1.0) is not None
    assert told <= 8  # of 1,500 at a rate of 1 in 1,000: eight or fewer in all but 1 of 10,000 seeds


def test_pass_at_k_leaves_out_prompts_with_fewer_than_k_scored_samples() -> None:
    assert look(one_lost).pass_at_k[4].value == 1.0
    none_whole = look(lambda index, greedy: [1.0] if greedy else [1.0, 1.0, 1.0, None])
    assert none_whole.pass_at_k[2].value == 1.0
    assert math.isnan(none_whole.pass_at_k[4].value)


def test_a_greedy_completion_that_could_not_be_scored_is_not_correct() -> None:
    assert look(one_lost).correct_greedy == (1.0, 1.0, 1.0, 0.0)


def test_unjudged_completions_are_in_no_mean_and_missing_parts_are_left_out() -> None:
    """Two environments: prompts 0 and 1 are right and wrong, nothing applies to 2, and the system lost 3."""

    @dataclass
    class Mixed(Answers):
        def run(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
            made = (
                replace(rollout(0.0), reward=Reward(1.0, {"style": 1.0})),
                replace(rollout(0.0), reward=Reward(0.0)),
            )
            rollouts = [made[:group_size], made[1:] * group_size, (), ()]
            failures = [(), (), (Failure("not asked", is_fault=False),), (Failure("lost"),)]
            names = ("sums", "words", "words", "sums")
            prompts = [replace(prompt, environment=name) for prompt, name in zip(prompts, names, strict=True)]
            return [Group(*of) for of in zip(prompts, rollouts, failures, strict=True)]

    found = evaluate(Mixed(some_right), PROMPTS, Sampling(), EvaluationConfig(num_samples=2, k=[1]))
    assert found.accuracy.value == pytest.approx(1 / 3)
    assert (found.correct_greedy[:2], found.correct_greedy[3]) == ((1.0, 0.0), 0.0)
    assert math.isnan(found.correct_greedy[2])
    assert found.reward_parts["style"].value == 1.0
    assert {name: part.accuracy.value for name, part in found.parts.items()} == {"sums": 0.5, "words": 0.0}
    assert look(some_right).parts == {}


# ------------------------------------------------------------------------------------------------ the real source


def test_every_look_uses_the_same_random_numbers() -> None:
    """Differences between two looks are the policy's, not those of luck."""
    policy = load_policy(small_config().model, seed=0)
    environment = scripted()
    sampler = Sampler(NativeEngine(policy, 1 << 24, 8), environment, policy.tokenizer)
    source = LocalSource(sampler, PromptStream(environment.prompts("train"), 0, True), 2, Sampling(max_tokens=4))
    settings = EvaluationConfig(num_samples=4, k=[1])
    tests = environment.prompts("test")
    first = evaluate(source, tests, Sampling(max_tokens=4, seed=1), settings)
    source.take(2)
    again = evaluate(source, tests, Sampling(max_tokens=4, seed=1), settings)
    other = evaluate(source, tests, Sampling(max_tokens=4, seed=2), settings)
    source.close()
    assert first == again
    assert other.mean_reward != first.mean_reward
    assert other.correct_greedy == first.correct_greedy


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [
        ([0.5], False),
        ([0.5, 0.6], True),
        ([0.5, 0.5], False),
        ([0.5, 0.7, 0.6], False),
        ([math.nan, 0.1], True),
        ([math.nan, math.nan], False),
    ],
)
def test_an_evaluation_is_the_best_where_it_is_above_all_before_it(accuracies: list[float], best: bool) -> None:
    assert is_best(accuracies) is best


@pytest.mark.long
def test_the_reference_is_the_policy_of_the_best_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluations after steps 1 and 3 are better than all before, that after step 2 is not."""
    use(monkeypatch, scripted())
    monkeypatch.setattr(stages, "is_best", lambda accuracies: len(accuracies) in (2, 4))
    config = small_config(num_steps=4, evaluation__every=1, preflight__enabled=False, output__save_every=1)
    config.output.keep_last, config.output.keep_best = 9, False
    config.algorithm.kl_coef, config.algorithm.reference_refresh_on_best = 0.1, True
    train(config, tmp_path / "run")
    kept, policies = {}, {}
    for step in range(1, 5):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        state = torch.load(folder / "state.pt", weights_only=True)
        kept[step] = state["trainer"]["reference"]["model.norm.weight"]
        policies[step] = load_file(folder / "policy" / "model.safetensors")["model.norm.weight"]
        assert "reference_refresh_on_best: true" in (folder / "settings.yaml").read_text()
    assert torch.equal(kept[1], policies[1])
    assert torch.equal(kept[2], policies[1])
    assert torch.equal(kept[3], policies[3])
    assert not torch.equal(policies[1], policies[2])


def test_an_evaluation_of_which_nothing_could_be_scored_says_nothing_of_right_answers() -> None:
    found = look(lambda index, greedy: [None] * (1 if greedy else 4))
    assert (found.accuracy, found.pass_at_k) == (None, {})
    assert math.isnan(found.reward_mean.value)
    assert found.num_unscored == 20
