"""A dry run of custom functions on small synthetic inputs.

Else a mistake shows after the first groups were sampled, or never: an advantage of NaN trains nothing.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.algorithm.aggregation import AGGREGATIONS, Denominators
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.credit.assign import estimate_advantages, selected_by, shape_rewards
from covey.algorithm.credit.scores import Scores, scores
from covey.algorithm.credit.selection import GROUP_FILTERS, SELECTION
from covey.algorithm.credit.shaping import SHAPING
from covey.algorithm.kl import ESTIMATORS
from covey.algorithm.loss_inputs import LossInputs, RatioOptions, loss_inputs, select
from covey.algorithm.losses import LOSS_FUNCTIONS
from covey.algorithm.objective import evaluate_loss, no_gradient
from covey.algorithm.settings import AlgorithmConfig
from covey.config.schema import Config
from covey.rollouts.group_checks import Outcome
from covey.rollouts.settings import group_sizes
from covey.rollouts.stream import AdaptiveSampler, PromptSampler
from covey.system import custom
from covey.system.lookup import describe
from covey.types import Prompt
from covey_preflight.subject import Check, PreflightContext

Options = Mapping[str, Any] | None
Make = Callable[[custom.Custom, Config, Sequence[Prompt]], None]
"""Tries a function. ValueError names its fault."""
NUM_GROUPS = 3
CLOSE = 1e-5
"""Tolerance between two values of the same token or rollout; relative, and absolute for small ones."""


def check_custom(subject: PreflightContext) -> Check:
    """Check that every custom function returns a valid, trainable result."""
    config, stream = subject.config, subject.run.source.stream
    try:
        tried = try_curriculum(config, stream) if ":" in config.curriculum.name else []
        tried += try_custom(config, subject.prompts)
    except ValueError as error:
        return Check(False, str(error), "", "fix the function")
    return Check(True, f"{', '.join(tried)} tried on made-up inputs", "")


def try_custom(config: Config, prompts: Sequence[Prompt]) -> list[str]:
    """Try all custom functions; return their names. ValueError for the first error."""
    tried = []
    for trial, name, options in _find_custom(config.algorithm):
        function = custom.lookup(trial.role, name, trial.table, options)
        assert isinstance(function, custom.Custom), "the name has a colon"
        trial.make(function, config, prompts)
        tried.append(name)
    return list(dict.fromkeys(tried))


def has_custom(config: Config) -> bool:
    return ":" in config.curriculum.name or any(_find_custom(config.algorithm))


def _find_custom(algorithm: AlgorithmConfig) -> Iterator[tuple["Trial", str, Options]]:
    """Yield every custom function with its trial and options."""
    for trial in TRIALS:
        for name, options in trial.named(algorithm):
            if name is not None and ":" in name:
                yield trial, name, options


@dataclass(frozen=True, slots=True)
class Trial:
    """Trial of a custom function, by setting."""

    role: custom.FunctionRole
    table: Mapping[str, Callable[..., Any]]
    """covey's own functions for it."""
    named: Callable[[AlgorithmConfig], Iterable[tuple[str | None, Options]]]
    """Returns the names that the setting has, each with its options."""
    make: Make


def synthetic_cases(config: Config, prompts: Sequence[Prompt]) -> dict[str, Scores]:
    """Make synthetic batches: plain, equal and unscored rewards. Keys name the case."""
    size = min(group_sizes(config.group_size, config.group_size_schedule))
    plain = [(3 * group + 2 * member) % 7 / 4 for group in range(NUM_GROUPS) for member in range(size)]
    cases = {
        "": plain,
        "where the rewards of a group are equal": [0.5] * size + plain[size:],
        "where a completion was not scored (NaN)": [float("nan"), *plain[1:]],
    }
    num_parts = max(1, len(config.rewards))
    return {special: _made_up(rewards, size, num_parts, prompts) for special, rewards in cases.items()}


def _made_up(rewards: list[float], size: int, num_parts: int, prompts: Sequence[Prompt]) -> Scores:
    """Add the other columns to rewards, with answers to real prompts."""
    places = range(len(rewards))
    given = scores(
        rewards,
        [place // size for place in places],
        lengths=[1 + place % 5 for place in places],
        parts=[[reward] * num_parts for reward in rewards],
    )
    return replace(
        given,
        total_lengths_N=given.lengths_N + 1,
        truncated_N=torch.tensor([place % size == 1 for place in places]),
        token_ids=tuple((1,) * (1 + place % size % 5) for place in places),
        prompts=tuple(prompts[place // size % len(prompts)] for place in places),
        texts=tuple(f"made-up answer {place % size}" for place in places),
    )


def _on_each(trial: Callable[[custom.Custom, Scores], object]) -> Make:
    """Return a trial on each case, whose errors name the case."""

    def make(function: custom.Custom, config: Config, prompts: Sequence[Prompt]) -> None:
        for special, given in synthetic_cases(config, prompts).items():
            try:
                trial(function, given)
            except ValueError as error:
                raise ValueError(f"{error}{', ' if special else ''}{special}") from error

    return make


def _try_shaping(shape: custom.Custom, given: Scores) -> None:
    shape_rewards(shape, given.rewards_N, given)


def _try_selection(choose: custom.Custom, given: Scores) -> None:
    """Try a selection with centred rewards as the advantages."""
    selected_by(choose, given, ADVANTAGES["group_center"])


def _try_group_filter(keep: custom.Custom, config: Config, prompts: Sequence[Prompt]) -> None:
    """Try a filter on single groups, one of equal rewards."""
    for rewards in ([0.0, 1.0, 0.5], [1.0, 1.0, 1.0]):
        found = keep(torch.tensor(rewards, dtype=torch.float64))
        is_flag = isinstance(found, Tensor) and found.dtype == torch.bool and found.numel() == 1
        if not (isinstance(found, bool | np.bool_) or is_flag):
            raise keep.error("return True or False", f"{found!r:.60}")


def _try_loss(loss: custom.Custom, config: Config, prompts: Sequence[Prompt]) -> None:
    """Try a loss on four rollouts, one without loss tokens."""
    algorithm = config.algorithm
    leaf_NT, whole = synthetic_loss_inputs(algorithm)
    loss_NT, _ = evaluate_loss(loss, whole)
    loss.check_finite(loss_NT, whole.mask_NT, whole.log_probs_NT, "log-prob")
    (gradient_NT,) = torch.autograd.grad(select(loss_NT, whole.mask_NT).sum(), leaf_NT, allow_unused=True)
    if gradient_NT is None:  # it depends on another leaf, of its own
        raise no_gradient(loss)
    loss.check_finite(gradient_NT, torch.ones_like(gradient_NT, dtype=torch.bool), leaf_NT.detach(), "log-prob")
    _, part = synthetic_loss_inputs(algorithm, num_rows=2)
    _check_same(loss, "rollouts apart", "fewer are beside one", evaluate_loss(loss, part)[0], loss_NT[:2], part)
    _, wider = synthetic_loss_inputs(algorithm, padding=3)
    wide_NT = evaluate_loss(loss, wider)[0][:, :5]
    _check_same(loss, "tokens outside of inputs.mask_NT out", "there is more padding", wide_NT, loss_NT, whole)


def synthetic_loss_inputs(algorithm: AlgorithmConfig, num_rows: int = 4, padding: int = 0) -> tuple[Tensor, LossInputs]:
    """Return log-probs as a leaf and the loss's inputs, always the same."""
    generator = torch.Generator().manual_seed(0)
    log_probs_NT, moved_NT = -2 * torch.rand(2, 4, 5, generator=generator)
    mask_NT = torch.arange(5) < torch.tensor([5, 2, 0, 3])[:, None]
    advantages_NT = torch.tensor([1.0, -0.5, 0.25, 0.0])[:, None].expand(4, 5)
    old_NT = log_probs_NT + 0.3 * (moved_NT + 1)
    given = [values[:num_rows] for values in (log_probs_NT, old_NT, advantages_NT, mask_NT)]
    leaf_NT, old_NT, advantages_NT, mask_NT = (torch.nn.functional.pad(values, (0, padding)) for values in given)
    leaf_NT.requires_grad_()
    options = RatioOptions(algorithm.ratio, algorithm.log_ratio_clamp)
    return leaf_NT, loss_inputs(leaf_NT, old_NT, advantages_NT, mask_NT, ratio_options=options)


def _check_same(
    loss: custom.Custom, keeps: str, other: str, found_NT: Tensor, expected_NT: Tensor, inputs: LossInputs
) -> None:
    """Check that a token's loss does not depend on other rollouts."""
    gap_NT = select(found_NT - expected_NT, inputs.mask_NT).abs()
    allowed_NT = CLOSE * (1 + select(expected_NT, inputs.mask_NT).abs())
    if bool((gap_NT > allowed_NT).any()):
        raise loss.error(f"keep {keeps}: the update must not depend on micro-batches", f"another loss where {other}")


def _try_kl_estimator(estimator: custom.Custom, config: Config, prompts: Sequence[Prompt]) -> None:
    """Try a KL estimator on log-ratios from -2 to 2."""
    q_NT = torch.linspace(-2, 2, 12).view(3, 4)
    leaf_NT = q_NT.clone().requires_grad_()
    value_NT = estimator.check_tensor(estimator(leaf_NT, config.algorithm.kl_clamp), (3, 4), "token")
    is_differentiated = config.algorithm.kl_in == "loss" and config.algorithm.kl_gradient == "naive"
    if is_differentiated and not value_NT.requires_grad:
        raise estimator.error("depend on q_NT for kl_gradient=naive", "a tensor without that gradient")
    estimator.check_finite(value_NT.detach(), torch.ones(3, 4, dtype=torch.bool), q_NT, "log-ratio")
    if not torch.allclose(estimator(q_NT[:1], config.algorithm.kl_clamp), value_NT[:1], rtol=CLOSE, atol=CLOSE):
        raise estimator.error("take each token alone", "another value where fewer are beside it")


def _try_aggregation(weigh: custom.Custom, config: Config, prompts: Sequence[Prompt]) -> None:
    """Try an aggregation on rollouts of 0 to 5 loss tokens."""
    counts_N, denominators = torch.tensor([0.0, 1.0, 3.0, 5.0]), Denominators(tokens=9, sequences=3, length=16)
    weights_N = weigh.check_tensor(weigh(counts_N, denominators), (4,), "rollout")
    weigh.check_finite(weights_N, torch.ones(4, dtype=torch.bool), counts_N, "number of loss tokens")
    if not torch.allclose(weigh(counts_N[2:], denominators), weights_N[2:], rtol=CLOSE):
        raise weigh.error(
            "divide by denominators alone: the update must not depend on micro-batches",
            "another weight where fewer rollouts are beside one",
        )


NUM_DRAWS = 64


def try_curriculum(config: Config, stream: PromptSampler) -> list[str]:
    """Try the run's curriculum and restore it. ValueError describes the error."""
    role = custom.CURRICULUM
    make = custom.lookup(role, config.curriculum.name, {}, config.curriculum.options)
    assert isinstance(make, custom.Custom), "the name has a colon"
    try:
        _try_stream(make, stream)
    except ValueError as error:
        if str(error).startswith(f"{role.setting}="):
            raise
        raise ValueError(f"{role.setting}={make.name} {describe(error)}") from error
    except Exception as error:
        raise ValueError(f"{role.setting}={make.name} {describe(error)}") from error
    return [make.name]


def _try_stream(make: custom.Custom, stream: PromptSampler) -> None:
    before, start = _round_trip(make, stream), stream.position
    drawn = stream.draw(NUM_DRAWS)
    _check_draws(make, stream, drawn)
    if stream.position != start + NUM_DRAWS:
        raise make.error(
            f"count what it drew: position {start + NUM_DRAWS} after {NUM_DRAWS} draws", f"{stream.position}"
        )
    if isinstance(stream, AdaptiveSampler):
        stream.learn([Outcome(p.environment, p.id, index % 5 / 4) for index, (p, _) in enumerate(drawn)])
        stream.take_metrics()
    after = _round_trip(make, stream)
    following = stream.draw(8)
    for state, expected in ((after, following), (before, drawn)):
        stream.load_state_dict(state)
        if _ids(stream.draw(len(expected))) != _ids(expected):
            raise make.error("draw the same prompts from the same state, or no run could be resumed", "others")
    stream.load_state_dict(before)


def _round_trip(make: custom.Custom, stream: PromptSampler) -> dict[str, Any]:
    """Return the state after a round trip through a checkpoint."""
    state, file = stream.state_dict(), BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        read: dict[str, Any] = torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        raise make.error("keep numbers, strings, lists, dicts and tensors in state_dict()", f"{state!r:.80}") from error
    return read


def _check_draws(make: custom.Custom, stream: PromptSampler, drawn: Any) -> None:
    requirement = f"give {NUM_DRAWS} pairs (prompt, number) for draw({NUM_DRAWS})"
    if not isinstance(drawn, list | tuple) or len(drawn) != NUM_DRAWS:
        raise make.error(requirement, f"{drawn!r:.60}")
    known = {prompt.id for prompt in stream.prompts}
    for pair in drawn:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Prompt) and isinstance(pair[1], int)
        ):
            raise make.error(requirement, f"{pair!r:.60}")
        if pair[0].id not in known:
            raise make.error("draw from its prompts", f"prompt {pair[0].id}")
    twice = [pair for pair, count in Counter(_ids(drawn)).items() if count > 1]
    if twice:
        raise make.error(
            "give a prompt another number every time it comes, or the same completions are sampled again",
            f"prompt {twice[0][0]} with {twice[0][1]} twice",
        )


def _ids(drawn: Sequence[tuple[Prompt, int]]) -> list[tuple[str, int]]:
    return [(prompt.id, number) for prompt, number in drawn]


TRIALS = (
    Trial(custom.SHAPING, SHAPING, lambda a: a.shaping.items(), _on_each(_try_shaping)),
    Trial(custom.ADVANTAGE, ADVANTAGES, lambda a: [(a.advantage, a.advantage_options)], _on_each(estimate_advantages)),
    Trial(custom.SELECTION, SELECTION, lambda a: [(a.selection, a.selection_options)], _on_each(_try_selection)),
    Trial(custom.GROUP_FILTER, GROUP_FILTERS, lambda a: [(a.group_filter, a.group_filter_options)], _try_group_filter),
    Trial(custom.LOSS, LOSS_FUNCTIONS, lambda a: [(a.loss, a.loss_options)], _try_loss),
    Trial(custom.KL_ESTIMATOR, ESTIMATORS, lambda a: [(a.kl_estimator, None)], _try_kl_estimator),
    Trial(custom.AGGREGATION, AGGREGATIONS, lambda a: [(a.aggregation, None)], _try_aggregation),
    Trial(custom.KL_AGGREGATION, AGGREGATIONS, lambda a: [(a.kl_aggregation, None)], _try_aggregation),
)
"""Trials in the order in which functions are called."""
