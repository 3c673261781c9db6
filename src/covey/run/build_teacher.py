"""Build the teacher of a run, and what it reads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import nn

from covey.algorithm.settings import AlgorithmConfig
from covey.algorithm.teacher.settings import SELF, asks_for_gold, is_address
from covey.cluster.teacher_server import TeacherServer
from covey.config.schema import Config
from covey.policy.logprobs import ReferenceElsewhere
from covey.policy.models.reference_model import load_reference_model, reference_in_memory, vocabulary_of
from covey.policy.policy import Policy
from covey.policy.reference import Reference, make_reference
from covey.policy.teacher import Teacher
from covey.rollouts.demonstrations import demonstration_group
from covey.rollouts.lessons import GoldAnswers, Lessons
from covey.rollouts.sampler import Sampler
from covey.trainer.optimizer import TrainerSettings
from covey.types import Group, Prompt, Rollout

SETTING = "algorithm.teacher"
LOOKED_AT = 16
"""Prompts that are asked for right answers before the first step."""


def build_teacher(
    config: Config, policy: Policy, reference: Reference | ReferenceElsewhere | None, given: nn.Module | None = None
) -> Teacher | None:
    """Build the teacher that the settings ask for, None without one.

    It is the KL penalty's `reference` where that is the same model, and `given` where it is a model in memory.
    """
    algorithm = config.algorithm
    if algorithm.teacher is None:
        return None
    temperature = algorithm.teacher_temperature
    if algorithm.teacher != SELF:
        return Teacher(_other_model(config, policy, reference, given), temperature=temperature)
    live = Reference(policy, None, is_own=True)
    if algorithm.teacher_weights == "live":
        return Teacher(live, temperature=temperature)
    if algorithm.teacher_weights == "ema":
        moving = make_reference(policy, refreshed=True)
        return Teacher(moving, rate=algorithm.teacher_rate, follows=True, temperature=temperature)
    is_shared = _is_shared(reference, algorithm) and algorithm.reference_model is None
    first = reference if reference is not None and is_shared else make_reference(policy, refreshed=False)
    if algorithm.teacher_weights == "base":
        return Teacher(first, temperature=temperature)
    return Teacher(first, live, algorithm.teacher_rate, temperature=temperature)


def _is_shared(reference: Reference | ReferenceElsewhere | None, algorithm: AlgorithmConfig) -> bool:
    """Return True where the reference can be the teacher, too.

    One of another process tells log-probs of sampled tokens alone.
    """
    is_told = algorithm.teacher_term != "divergence" and algorithm.teacher_weights != "trust_region"
    return not algorithm.refreshes_reference and (is_told or isinstance(reference, Reference))


def _other_model(
    config: Config, policy: Policy, reference: Reference | ReferenceElsewhere | None, given: nn.Module | None
) -> Reference | ReferenceElsewhere:
    name, algorithm = config.algorithm.teacher, config.algorithm
    assert name is not None, "asked for by a setting"
    if is_address(name):
        is_told = algorithm.teacher_term == "divergence"
        return TeacherServer(name, policy.tokenizer, algorithm.teacher_options["top_k"] if is_told else 0)
    if given is not None:
        return reference_in_memory(given, config.model, policy, SETTING)
    is_same = (name, None) == (algorithm.reference_model, algorithm.reference_revision)
    if reference is not None and is_same and _is_shared(reference, algorithm):
        return reference
    return load_reference_model(config.model, name, None, vocabulary_of(policy), seed=config.seed, setting=SETTING)


def with_lessons(
    settings: TrainerSettings,
    config: Config,
    sampler: Sampler,
    policy: Policy,
    teacher: Teacher | None,
    prompts: Sequence[Prompt],
) -> TrainerSettings:
    """Return the trainer's settings with the teacher's reading and given answers.

    ValueError where right answers are asked for and none is known.
    """
    algorithm = config.algorithm
    gold = GoldAnswers(sampler.environment, algorithm.gold_column)
    is_asked = asks_for_gold(algorithm.teacher_shows, algorithm.sft_coef, algorithm.sft_answers)
    if is_asked and all(gold.of(prompt) is None for prompt in prompts[:LOOKED_AT]):
        raise ValueError(
            "algorithm.teacher_shows=[gold] and algorithm.sft_coef need right answers, which the environment does not "
            "know: set algorithm.gold_column to their column"
        )
    teach = None if teacher is None else _lessons(algorithm, sampler, policy, teacher, gold)
    answers = None if algorithm.sft_coef == 0 else given_answers(config, sampler, policy, gold)
    return replace(settings, teach=teach, answers=answers)


def _lessons(
    algorithm: AlgorithmConfig, sampler: Sampler, policy: Policy, teacher: Teacher, gold: GoldAnswers
) -> Lessons | None:
    """Return the writer of a teacher's prompts, None without one."""
    own = teacher.model
    longest = own.policy.max_length if isinstance(own, Reference) else policy.max_length
    if not algorithm.teacher_shows and longest >= policy.max_length:
        return None
    shows, template = tuple(algorithm.teacher_shows), algorithm.teacher_template
    selection = algorithm.teacher_selection
    return Lessons(sampler.tokenizer, sampler.environment, gold, shows, template, longest, selection)


def given_answers(
    config: Config, sampler: Sampler, policy: Policy, gold: GoldAnswers
) -> Callable[[Group], Sequence[Rollout]]:
    """Return a function for a group's given answers."""
    algorithm, stop = config.algorithm, config.sampling.stop

    def find(group: Group) -> Sequence[Rollout]:
        if algorithm.sft_answers == "best":
            best = max(group.rewards, default=0.0)
            found = [one for one in group.rollouts if one.reward.value == best >= algorithm.sft_threshold]
        else:
            text = gold.of(group.prompt)
            tools = sampler.environment.tool_schemas(group.prompt)
            given = None if text is None else demonstration_group(policy, group.prompt, text, stop, tools)
            found = [] if given is None else list(given.rollouts)
        kept = (skip_first(one, algorithm.sft_skip_first) for one in found if len(one.input_ids) < policy.max_length)
        return [one for one in kept if one.num_loss_tokens > 0]

    return find


def skip_first(rollout: Rollout, count: int) -> Rollout:
    """Return the rollout without its first `count` loss tokens in the loss."""
    if count == 0:
        return rollout
    numbers = accumulate(rollout.loss_mask)
    mask = tuple(own and number > count for own, number in zip(rollout.loss_mask, numbers, strict=True))
    return replace(rollout, loss_mask=mask)
