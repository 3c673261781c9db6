"""Try an algorithm's built-in functions on made-up numbers, before any step.

Imports torch. The preflight tries custom functions.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from covey.algorithm.build import build_credit
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.credit.scores import Scores, scores
from covey.algorithm.credit.selection import GROUP_FILTERS
from covey.algorithm.loss_inputs import loss_inputs
from covey.algorithm.objective import Objective
from covey.algorithm.settings import AlgorithmConfig
from covey.system.custom import Custom

Trial = tuple[str, Callable[..., object], Callable[[], object]]
"""(setting and name, the function, the call that may raise)."""


def try_functions(algorithm: AlgorithmConfig, objective: Objective, group_size: int) -> None:
    """Call each built-in function. ValueError names the setting of the first failure."""
    for setting, function, call in (*_of_credit(algorithm, group_size), *_of_loss(algorithm, objective)):
        if isinstance(function, Custom):
            continue
        try:
            call()
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"algorithm.{setting}: {' '.join(str(error).split())}") from error


def _of_credit(algorithm: AlgorithmConfig, group_size: int) -> Iterator[Trial]:
    """Yield the functions between rewards and advantages."""
    credit, given = build_credit(algorithm), _made_up_scores(group_size)
    for name, shape in zip(algorithm.shaping, credit.shaping, strict=True):
        yield f"shaping.{name}", shape, partial(shape, given.rewards_N, given)
    yield f"advantage_options of {algorithm.advantage}", credit.estimate, partial(credit.estimate, given)
    if credit.select is not None:
        call = partial(credit.select, given, ADVANTAGES["group_center"])
        yield f"selection_options of {algorithm.selection}", credit.select, call
    if algorithm.group_filter in GROUP_FILTERS:
        keep = partial(GROUP_FILTERS[algorithm.group_filter], **algorithm.group_filter_options)
        yield f"group_filter_options of {algorithm.group_filter}", keep, partial(keep, given.rewards_N[:group_size])


def _of_loss(algorithm: AlgorithmConfig, objective: Objective) -> Iterator[Trial]:
    log_probs_NT = torch.tensor([[-0.5, -1.0], [-2.0, -0.25]])
    mask_NT = torch.ones_like(log_probs_NT, dtype=torch.bool)
    inputs = loss_inputs(log_probs_NT, log_probs_NT.flip(0), torch.tensor([1.0, -1.0]), mask_NT)
    loss, selector = objective.loss.function, objective.loss.selector
    yield f"loss_options of {algorithm.loss}", loss, partial(loss, inputs)
    if selector is not None:
        yield f"loss_options of {algorithm.loss}", selector, partial(selector, inputs, 0)


def _made_up_scores(group_size: int) -> Scores:
    rewards = [float(index % 3) for index in range(2 * group_size)]
    groups = [index // group_size for index in range(2 * group_size)]
    given = scores(rewards, groups, parts=[[reward] for reward in rewards])
    return replace(
        given,
        total_lengths_N=given.lengths_N + 1,
        truncated_N=torch.ones_like(given.scored),
        token_ids=((1,),) * len(rewards),
    )
