"""Promise 7, in pairs: beside every choice, what changes rewards and advantages still does, or is refused by name."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch

from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.credit.scores import Scores, scores
from covey.algorithm.credit.selection import GROUP_FILTERS, SELECTION
from covey.algorithm.credit.shaping import SHAPING
from covey.algorithm.credit.turns import TURN_CREDIT
from covey.algorithm.loss_inputs import loss_inputs
from covey.algorithm.losses import LOSS_FUNCTIONS, LOSSES
from covey.config.rules.options import OPTION_NEEDS
from covey.config.schema import Config
from covey.config.validate import validate
from covey.types import Group, Prompt, Reward
from tests.support.builders import credit_assigner

from ...support.small import rollout

K = {"passk": {"k": 2}, "pkpo": {"k": 2}}
SHAPINGS: dict[str, dict[str, Any]] = {
    "soft_overlong": {"max_len": 6, "cache": 4},
    "stop_properly": {"coef": 0.5},
    "repetition": {"ngram": 1},
    "pass_rate_linear": {},
}
BESIDE: dict[str, dict[str, Any]] = {
    **{f"shaping {name}": {"shaping": {name: options}} for name, options in SHAPINGS.items()},
    "kl_in=reward": {"kl_coef": 1.0, "kl_in": "reward", "kl_estimator": "k1"},
    "advantage_clip": {"advantage_clip": 0.05},
    "length_normalizer": {"length_normalizer": 1.0},
    "selection top_k": {"selection": "top_k", "selection_options": {"k": 3}},
    "selection max_variance": {"selection": "max_variance", "selection_options": {"m": 3}},
}
KL = [[0.3, -0.2, 0.9, 0.1, 0.5, 0.0], [0.7, 0.0, 0.2, 0.4, -0.1, 0.6]]


def groups() -> list[Group]:
    """Two groups of unequal rewards, some negative, parts, lengths, ends and environments, with repeated tokens."""
    draw = random.Random(7)
    found = []
    for name in ("a", "b"):
        made = []
        for index in range(6):
            value, length = draw.uniform(-0.5, 1.5), draw.randint(1, 8)
            one = rollout(value, num_tokens=length, finish_reason="length" if index % 3 == 2 else "stop")
            parts = {"first": value * draw.random(), "second": draw.random()}
            made.append(replace(one, reward=Reward(value, parts)))
        found.append(Group(Prompt(name, name, "?", {}), tuple(made), ()))
    return found


def config_with(**algorithm: Any) -> Config:
    config = Config()
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    validate(config)
    return config


def credited(**algorithm: Any) -> list[float]:
    """Advantages, and which rollouts are kept: those left out do not count in the mean."""
    config = config_with(**algorithm)
    kl = KL if config.algorithm.kl_in == "reward" else None
    credit = credit_assigner(config.algorithm, {}).assign(groups(), kl)
    return [float(value) for part in (credit.advantages, credit.keep) for row in part for value in row]


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_beside_every_advantage_a_setting_of_rewards_changes_advantages_or_is_refused(
    advantage: str, beside: str
) -> None:
    chosen = {"advantage": advantage, "advantage_options": K.get(advantage, {})}
    if refused_beside(advantage, beside):
        with pytest.raises(ValueError, match=rf" needs .*{advantage}"):
            credited(**chosen, **BESIDE[beside])
        return
    pairs = zip(credited(**chosen), credited(**chosen, **BESIDE[beside]), strict=True)
    assert max(abs(before - after) for before, after in pairs) > 1e-6


def refused_beside(advantage: str, beside: str) -> bool:
    return advantage == "gdpo" and beside.startswith(("shaping", "kl_in"))


def test_what_changes_the_sum_of_rewards_alone_is_refused_beside_gdpo() -> None:
    for beside, line in (
        ({"shaping": {"repetition": {}}}, "algorithm.shaping=repetition needs an advantage of the whole reward"),
        (BESIDE["kl_in=reward"], "algorithm.kl_in=reward needs an advantage of the whole reward"),
    ):
        with pytest.raises(ValueError, match=f"^{line}, got algorithm.advantage=gdpo, "):
            config_with(advantage="gdpo", **beside)
    config_with(advantage="gdpo", kl_coef=0.1)


# ------------------------------------------------------------------------------------------------ options


def given_scores() -> Scores:
    """The same groups as an estimator sees them, with a group of one and a preference for every pair."""
    made = groups()
    rewards = [r.reward.value for group in made for r in group.rollouts] + [0.7]
    preferences_NN = torch.rand(len(rewards), len(rewards), generator=torch.Generator().manual_seed(1))
    found = scores(
        rewards,
        [*([0] * 6), *([1] * 6), 2],
        lengths=[len(r.target_ids) for group in made for r in group.rollouts] + [3],
        parts=[list(r.reward.parts.values()) for group in made for r in group.rollouts] + [[0.1, 0.2]],
        roles=[str(index % 2) for index in range(13)],
    )
    upper_NN = preferences_NN.triu(1)
    return replace(found, preferences_NN=upper_NN + (1 - upper_NN.T).tril(-1))


def shaping_inputs() -> Scores:
    lengths_N = torch.tensor([2.0, 9.0, 5.0, 4.0])
    return replace(
        scores([0.0] * 4, [0, 0, 1, 1]),
        written_N=lengths_N,
        total_lengths_N=lengths_N + torch.tensor([3.0, 1.0, 5.0, 0.0]),
        turns_N=torch.tensor([1.0, 3.0, 2.0, 1.0]),
        truncated_N=torch.tensor([False, True, False, True]),
        token_ids=((4, 5), (4, 4, 4, 6, 6, 6, 4, 4, 4), (7, 7, 7, 7, 7), (1, 2, 1, 2)),
    )


def of_advantage(name: str, options: Mapping[str, Any]) -> Any:
    needed = {"pkpo": {"k": 3}, "passk": {"k": 1}}.get(name, {})
    given = given_scores()
    if needed or name == "best_minus_second":  # no group may be smaller than k
        given = replace(given, rewards_N=given.rewards_N, groups_N=given.groups_N.clamp(max=1))
    return ADVANTAGES[name](given, **{**needed, **options}).tolist()


def of_selection(name: str, options: Mapping[str, Any]) -> Any:
    needed = {"top_k": {"k": 2}, "max_variance": {"m": 3}, "balanced_subset": {"group_size": 3}}[name]
    found = SELECTION[name](given_scores(), ADVANTAGES["group_zscore"], **{**needed, **options})
    return [found.keep_N.tolist(), found.advantages_N.tolist()]


def of_shaping(name: str, options: Mapping[str, Any]) -> Any:
    rewards_N = torch.tensor([1.0, 0.5, -0.5, 0.25])
    return SHAPING[name](rewards_N, shaping_inputs(), **{**SHAPINGS[name], **options}).tolist()


def of_filter(name: str, options: Mapping[str, Any]) -> Any:
    batches = ([0.0, 1e-7], [0.0, 0.3], [0.2, 0.2], [0.4, 0.9], [1.0, 1.0])
    return [GROUP_FILTERS[name](torch.tensor(rewards), **options) for rewards in batches]


def of_loss(name: str, options: Mapping[str, Any]) -> Any:
    generator = torch.Generator().manual_seed(3)
    log_probs_NT, old_NT = (-2 * torch.rand(6, 5, generator=generator) for _ in range(2))
    advantages_N = torch.tensor([1.5, -1.0, 0.3, -0.2, 2.0, -2.5])
    all_NT = torch.ones(6, 5, dtype=torch.bool)
    inputs = loss_inputs(log_probs_NT, old_NT, advantages_N, all_NT, selected_NT=all_NT.triu())
    needed = {"dro": {"beta": 0.1}}.get(name, {})
    return LOSSES[name].function(inputs, **{**needed, **options}).tolist()


OTHERS: dict[str, list[Any]] = {
    "singleton": ["raw"], "eps_mode": ["var_add", "var_floor", "floor", "max"], "post_normalize": ["batch_zscore"],
    "std_of": ["advantages", "centered"], "alpha": ["nonzero_rewards"], "f_norm": [2.0], "variant": ["none", "loo"],
    "loo_scale": ["published"], "scale": ["sum", "none"], "form": ["difference", "matrix"],
    "post": ["group_zscore", "token_whiten"], "baseline_over": ["group", "selected"], "rank_by": ["length"],
    "dual_clip": [1.1], "two_sided_delta": [1.3], "ratio_cap": [1.2], "pos": [(0.2, 3.0)], "neg": [(0.5, 0.9)],
}  # fmt: skip
"""Other values of options that are names, or of which a number alone says nothing."""
OBSERVED: dict[str, tuple[Mapping[str, Callable[..., Any]], Callable[[str, Mapping[str, Any]], Any]]] = {
    "advantage_options": (ADVANTAGES, of_advantage),
    "selection_options": (SELECTION, of_selection),
    "shaping": (SHAPING, of_shaping),
    "group_filter_options": (GROUP_FILTERS, of_filter),
    "loss_options": (LOSS_FUNCTIONS, of_loss),
}


AS_PUBLISHED = (("group_center_batch_std", "recenter"),)
"""Takes off a mean that is 0 already, as a document writes it."""
UNFIT = {"post_normalize": "none", "form": "win_rate", "post": "none", "variant": "none", "scale": "none"}
"""Values with which an option beside is not read."""


def other_values(name: str, default: Any) -> list[Any]:
    if name in OTHERS:
        return [value for value in OTHERS[name] if value != default]
    if isinstance(default, bool):
        return [not default]
    return [default + 1, 0] if isinstance(default, int) else [default + 0.3, default * 0.5 - 0.1]


def options() -> Iterator[tuple[str, str, str]]:
    for place, (table, _) in OBSERVED.items():
        for name, function in table.items():
            for parameter in signature(function).parameters.values():
                is_option = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
                if is_option and (name, parameter.name) not in AS_PUBLISHED:
                    yield place, name, parameter.name


def matters(place: str, name: str, along: Mapping[str, Any], option: str) -> bool:
    table, observe = OBSERVED[place]
    default = signature(table[name]).parameters[option].default
    found = []
    for value in other_values(option, default):
        try:
            found.append(observe(name, {**along, option: value}) != observe(name, along))
        except ValueError:  # not a value of this function
            continue
    assert found, f"no other value of {option} is taken by {name}: add one to OTHERS"
    return any(found)


@pytest.mark.parametrize(("place", "name", "option"), options())
def test_every_option_of_a_function_changes_what_it_gives_or_is_refused(place: str, name: str, option: str) -> None:
    needs = OPTION_NEEDS.get(name, {}).get(option)
    if needs is None:
        assert matters(place, name, {}, option)
        return
    other, value = needs
    assert not matters(place, name, {other: UNFIT[other]}, option)
    assert matters(place, name, {other: value}, option)
    table, _ = OBSERVED[place]
    default = signature(table[name]).parameters[option].default
    required = K.get(name, {})
    with pytest.raises(ValueError, match=rf"{option}=.* needs algorithm\.{place}\.{other}={value} for {name}, got"):
        config_with(advantage=name, advantage_options={**required, other: UNFIT[other], option: default})


def test_the_table_of_options_names_options_that_are_there() -> None:
    assert set(OPTION_NEEDS) <= {*ADVANTAGES, *SELECTION, *SHAPING, *GROUP_FILTERS, *TURN_CREDIT}
    for name, needs in OPTION_NEEDS.items():
        known = signature((ADVANTAGES | TURN_CREDIT)[name]).parameters
        assert {*needs, *(other for other, _ in needs.values())} <= set(known)
