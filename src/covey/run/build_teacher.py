"""Build the teacher of a run, and what it reads."""

from dataclasses import replace

from torch import nn

from covey.algorithm.settings import AlgorithmConfig
from covey.algorithm.teacher.settings import SELF
from covey.config.schema import Config
from covey.policy.logprobs import ReferenceElsewhere
from covey.policy.models.reference_model import load_reference_model, reference_in_memory, vocabulary_of
from covey.policy.policy import Policy
from covey.policy.reference import Reference, make_reference
from covey.policy.teacher import Teacher
from covey.rollouts.lessons import Gold, Lessons
from covey.rollouts.sampler import Sampler
from covey.trainer.optimizer import TrainerSettings

SETTING = "algorithm.teacher"


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
    first = reference if reference is not None and _is_first(algorithm) else make_reference(policy, refreshed=False)
    if algorithm.teacher_weights == "base":
        return Teacher(first, temperature=temperature)
    return Teacher(first, live, algorithm.teacher_rate, temperature=temperature)


def _is_first(algorithm: AlgorithmConfig) -> bool:
    """Return True where the reference is the policy as it began."""
    return algorithm.reference_model is None and not algorithm.refreshes_reference


def _other_model(
    config: Config, policy: Policy, reference: Reference | ReferenceElsewhere | None, given: nn.Module | None
) -> Reference | ReferenceElsewhere:
    name, algorithm = config.algorithm.teacher, config.algorithm
    assert name is not None, "asked for by a setting"
    if given is not None:
        return reference_in_memory(given, config.model, policy, SETTING)
    is_same = (name, None) == (algorithm.reference_model, algorithm.reference_revision)
    if reference is not None and is_same and not algorithm.refreshes_reference:
        return reference
    return load_reference_model(config.model, name, None, vocabulary_of(policy), seed=config.seed, setting=SETTING)


def with_lessons(
    settings: TrainerSettings, config: Config, sampler: Sampler, teacher: Teacher | None, policy_length: int
) -> TrainerSettings:
    """Return the trainer's settings with what a teacher reads."""
    algorithm = config.algorithm
    if teacher is None:
        return settings
    model = teacher.model
    longest = model.policy.max_length if isinstance(model, Reference) else policy_length
    if not algorithm.teacher_shows and longest >= policy_length:
        return settings
    gold = Gold(sampler.environment, algorithm.gold_column)
    teach = Lessons(
        sampler.tokenizer,
        sampler.environment,
        gold,
        tuple(algorithm.teacher_shows),
        algorithm.teacher_template,
        longest,
        algorithm.teacher_selection,
    )
    return replace(settings, teach=teach)
