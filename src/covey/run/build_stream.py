"""Build the order of the usable prompts."""

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from covey.algorithm.credit.selection import GROUP_FILTERS
from covey.algorithm.objective import Objective
from covey.algorithm.settings import AlgorithmConfig
from covey.engine.settings import SamplingConfig
from covey.environments.base import SPLITS, Environment, Split, are_words, naming
from covey.policy.models.chat_template import PLAIN_TEMPLATE
from covey.policy.models.nano import START_TURN
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.rollouts.curriculum import EasyToHard, Promotion, SuccessRateCurriculum, WeightedRoundRobin, Window
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.group_checks import GroupFilter
from covey.rollouts.sampler import Sampler
from covey.rollouts.settings import CurriculumConfig
from covey.rollouts.stream import PromptSampler, PromptStream
from covey.system import custom
from covey.system.text.format import number_of
from covey.types import Prompt

LOGGER = logging.getLogger(__name__)

TEMPLATE_TOKENS = 256
"""More than a chat template adds to one message."""
TOKENS_PER_CHARACTER = 4
"""No tokenizer needs more: a character has at most four bytes."""
STREAM_NAMES = ("prompts", "seed", "position", "draw", "state_dict", "load_state_dict")
"""Attributes that `covey.rollouts.stream.PromptSampler` needs."""


def build_stream(
    name: str,
    environment: Environment,
    prompts: Sequence[Prompt],
    curriculum: CurriculumConfig,
    *,
    seed: int,
    shuffle: bool,
) -> PromptSampler:
    """Build the order of prompts, round-robin over environments.

    ValueError where an environment has no prompts, or a curriculum by difficulty finds only one.
    """
    of_each = {name: list(prompts)}
    if environment.sampling_weights:
        parts = environment.sampling_weights
        of_each = {part: [prompt for prompt in prompts if prompt.environment == part] for part in parts}
    empty = [part for part, found in of_each.items() if not found]
    if empty:
        raise ValueError(f"environment={empty[0]} has no training prompts")
    graded = {part: _difficulties(curriculum, environment, found) for part, found in of_each.items()}
    if _by_difficulty(curriculum) and not any(graded.values()):
        raise ValueError("a curriculum by difficulty needs training prompts of two difficulties or more, got fewer")
    streams = {part: _make_stream(found, graded[part], curriculum, seed, shuffle) for part, found in of_each.items()}
    if environment.sampling_weights:
        return WeightedRoundRobin(streams, environment.sampling_weights, seed)
    return streams[name]


def check_graded(name: str, environment: Environment, curriculum: CurriculumConfig) -> None:
    """Refuse a curriculum without difficulties. ValueError."""
    if not _by_difficulty(curriculum):
        return
    with naming(environment, "difficulty"):
        if any(environment.difficulty(prompt) is not None for prompt in environment.prompts("train")):
            return
    asked = "name" if curriculum.name == "difficulty" else "per"
    raise ValueError(
        f"curriculum.{asked}=difficulty needs an environment that says how hard its prompts are, got environment={name}"
    )


def _by_difficulty(curriculum: CurriculumConfig) -> bool:
    return curriculum.name == "difficulty" or (curriculum.name == "success" and curriculum.per == "difficulty")


def _make_stream(
    prompts: Sequence[Prompt], difficulties: Sequence[float], c: CurriculumConfig, seed: int, shuffle: bool
) -> PromptSampler:
    """Order one environment's prompts, plainly without difficulties."""
    if ":" in c.name:
        return _custom(prompts, c, seed, shuffle)
    if c.name == "none" or (_by_difficulty(c) and not difficulties):
        return PromptStream(prompts, seed, shuffle)
    if c.name == "difficulty":
        rule = Promotion(c.promote_at, c.promotion_groups, c.demote_below, c.earlier_share)
        return EasyToHard(prompts, difficulties, rule, seed, shuffle=shuffle)
    lanes: dict[str, list[Prompt]] = {}
    for index, prompt in enumerate(prompts):
        lanes.setdefault(str(difficulties[index]) if c.per == "difficulty" else prompt.id, []).append(prompt)
    return SuccessRateCurriculum(lanes, Window(c.window[0], c.window[1], c.decay, c.explore), seed, shuffle=shuffle)


def _custom(prompts: Sequence[Prompt], curriculum: CurriculumConfig, seed: int, shuffle: bool) -> PromptSampler:
    make = custom.lookup(custom.CURRICULUM, curriculum.name, {}, curriculum.options)
    assert isinstance(make, custom.Custom), "the name has a colon"
    stream = make(prompts, seed, shuffle)
    if not isinstance(stream, PromptSampler):
        missing = [name for name in STREAM_NAMES if name not in {*vars(stream), *dir(type(stream))}]
        raise make.error(f"have {', '.join(STREAM_NAMES)}", f"a {type(stream).__name__} without {', '.join(missing)}")
    return stream


def _difficulties(curriculum: CurriculumConfig, environment: Environment, prompts: Sequence[Prompt]) -> Sequence[float]:
    """Return the difficulty of each prompt.

    Empty where nothing asks for them, the environment does not say, or all are equal.
    """
    if not _by_difficulty(curriculum):
        return ()
    with naming(environment, "difficulty"):
        found = [environment.difficulty(prompt) for prompt in prompts]
    # Either every prompt has a difficulty or none: an order over some would drop the others
    graded = [difficulty for difficulty in found if difficulty is not None]
    if graded and len(graded) < len(prompts):
        name = prompts[found.index(None)].id
        raise ValueError(f"a curriculum by difficulty needs one for each prompt of an environment, got none for {name}")
    return graded if len(set(graded)) > 1 else ()


def usable_prompts(
    sampler: Sampler, split: Split, max_length: int, sampling: SamplingConfig, bad_rows: str
) -> list[Prompt]:
    """Return a split's prompts; bad_rows=skip drops too long ones.

    With bad_rows=error the check before the run, or the engine, refuses the first of them by its id.
    """
    prompts = sampler.environment.prompts(split)
    if bad_rows == "error":
        return prompts
    longest = longest_prompt(sampling, max_length) if sampler.mask_id is None else max_length
    return fitting(prompts, sampler.tokenizer, longest)


def longest_prompt(sampling: SamplingConfig, max_length: int) -> int:
    """Return a prompt's most tokens that leave room for a whole answer.

    With sampling.max_total_tokens, which cuts answers, room for any.
    """
    most = sampling.max_total_tokens
    is_cut = most is not None and most <= max_length
    return most - 1 if is_cut and most is not None else max_length - sampling.max_tokens


def fitting(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Prompt]:
    """Return prompts of at most `max_tokens`, with a warning about others."""
    long = [prompt for prompt in prompts if _num_tokens(prompt, tokenizer, max_tokens) > max_tokens]
    if not long:
        return list(prompts)
    names = ", ".join(prompt.id for prompt in long[:3]) + (", ..." if len(long) > 3 else "")
    LOGGER.warning("%s of more than %d tokens skipped: %s", number_of(len(long), "prompt"), max_tokens, names)
    left_out = {prompt.id for prompt in long}
    return [prompt for prompt in prompts if prompt.id not in left_out]


def _num_tokens(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, enough: int) -> int:
    """Count a prompt's tokens, or bound them up to `enough`."""
    turns = [prompt.text] if isinstance(prompt.text, str) else [str(dict(message)) for message in prompt.text]
    bound = sum(TOKENS_PER_CHARACTER * len(turn) + TEMPLATE_TOKENS for turn in turns)
    return bound if bound <= enough else len(encode_prompt(tokenizer, prompt))


def spread(prompts: Sequence[Prompt], n: int) -> tuple[Prompt, ...]:
    """Choose n prompts, evenly over environments and splits. So no part of an ordered data set is favoured."""
    if len(prompts) <= n:
        return tuple(prompts)
    chosen: list[Prompt] = []
    names = list(dict.fromkeys(prompt.environment for prompt in prompts))
    for place, name in enumerate(names):
        own = [prompt for prompt in prompts if prompt.environment == name]
        share = min(len(own), n // len(names) + (place < n % len(names)))
        chosen += [own[index * len(own) // share] for index in range(share)]
    return tuple(chosen)


def check_rendering(model: ModelConfig, policy: Policy, prompts: Sequence[Prompt]) -> None:
    """Warn of an unused chat template, and of messages without one. ValueError where a setting is about it."""
    if not prompts:
        return
    template = policy.tokenizer.chat_template
    if any(not isinstance(prompt.text, str) for prompt in prompts):
        if template == PLAIN_TEMPLATE:
            LOGGER.warning(
                "%s has no chat template: messages go to it as plain text, a blank line after each; a base model "
                "continues text, so prompts must show what an answer looks like",
                model.name,
            )
        return
    if template is None or template == PLAIN_TEMPLATE:
        policy.tokenizer.chat_template = None
        return
    if model.chat_template_kwargs:
        raise ValueError(
            f"model.chat_template_kwargs={model.chat_template_kwargs} needs prompts that are conversations, "
            "got text only"
        )
    warn_of_text(model.name, template)


def warn_of_text(name: str, template: str | None) -> None:
    """Warn of text for a model that has a chat template."""
    if template and template != PLAIN_TEMPLATE and START_TURN not in template:  # which nano's templates alone have
        LOGGER.warning(
            "prompts that are text go to %s without its chat template; a prompt that is a list of messages "
            "(role, content) goes through it",
            name,
        )


def check_prompts(name: str, environment: Environment) -> None:
    """Refuse invalid prompts and shared ids."""
    seen: dict[str, Split] = {}
    for split in SPLITS:
        with naming(environment, "prompts"):
            prompts: object = environment.prompts(split)
        if not isinstance(prompts, list | tuple):
            kind = type(prompts).__name__
            raise ValueError(f"environment={name} must return a list of Prompts for split {split}, got a {kind}")
        wrong = [prompt for prompt in prompts if not isinstance(prompt, Prompt)]
        if wrong or not prompts:
            got = f"a {type(wrong[0]).__name__}" if wrong else "none"
            raise ValueError(f"environment={name} must give Prompts for split {split}, got {got}")
        for prompt in prompts:
            if prompt.id in seen:
                where = f"two prompts of split {split}" if seen[prompt.id] == split else "prompts of train and test"
                raise ValueError(
                    f"environment={name} must give each prompt an id of its own, {where} have {prompt.id!r}"
                )
            seen[prompt.id] = split
            if not are_words(prompt.text):
                raise ValueError(
                    f"environment={name} must give a prompt text, or messages with role and content; "
                    f"{prompt.id!r} of split {split} is {prompt.text!r:.80}"
                )


def build_group_filter(algorithm: AlgorithmConfig) -> GroupFilter | None:
    """Build the dynamic-sampling filter, None where every group is kept."""
    if algorithm.group_filter is None:
        return None
    name, options = algorithm.group_filter, algorithm.group_filter_options
    keep = custom.lookup(custom.GROUP_FILTER, name, GROUP_FILTERS, options)
    if algorithm.teacher is None:
        return keep
    # A group of equal rewards has a signal where a teacher judges it
    if algorithm.teacher_shows != ["solution"]:
        return None
    least = algorithm.teacher_selection.get("threshold", 1.0)
    return lambda rewards_M: keep(rewards_M) or (len(rewards_M) > 1 and bool((rewards_M >= least).any()))


def reads_sampler(objective: Objective) -> bool:
    """Return True if the update reads the sampler's log-probs."""
    by_weight = objective.weights is not None or bool(objective.criteria)
    by_distance = objective.sequence_delta is not None or objective.m2po_threshold is not None
    of_loss = objective.denominator == "behaviour" or objective.kl.sampler_coef != 0
    of_loss |= objective.teacher is not None and objective.teacher.base == "behaviour"
    return by_weight or by_distance or of_loss
