"""The doctor advises what a run has not done yet, by what covey says of its settings."""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from covey.algorithm.losses import LOSSES
from covey.config import compose as settings
from covey.config.auto_adjust import adjust_unset_options
from covey.config.schema import IDS, STOPPERS, Config, setting_names
from covey.config.shelves import presets
from covey.config.validate import validate
from covey.run.records.summary import TRAINED, paired_gain
from covey.system.section import flat
from covey_doctor import diagnose as doctor
from covey_doctor.advice import CLIPPING, DIRECTION, KEY, VALUE
from covey_doctor.advice import still_open as choose
from covey_doctor.catalogue import RULES
from covey_doctor.diagnose import diagnose
from covey_doctor.log import NOT_SHOWN, log_of
from covey_doctor.verdicts import paired_change
from covey_report.doctor.health import facts_of
from covey_report.runs.outcome import not_shown

SETTINGS = flat(asdict(Config()))


def still_open(advice: tuple[str, ...], settings: Mapping[str, Any]) -> tuple[str, ...]:
    return choose(advice, settings, facts_of(settings))


def open_with(*advice: str, **settings: Any) -> list[str]:
    return list(still_open(advice, SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}))


@pytest.mark.parametrize(
    ("advice", "settings", "said"),
    [
        ("engine.name=native", {}, []),
        ("engine.name=native", {"engine__name": "vllm"}, ["engine.name=native"]),
        ("cold_start.enabled=true", {"cold_start__enabled": True}, []),
        ("sampling.top_p=1", {"sampling__top_p": 1.0}, []),
        ("max_staleness lower", {"max_staleness": 0}, []),
        ("max_staleness lower", {"max_staleness": 4}, ["max_staleness lower (now 4)"]),
        ("max_staleness higher, if dropped as old", {"max_staleness": 0}, []),  # nothing is old
        ("cold_start.num_steps larger", {"cold_start__enabled": False}, []),
        (
            "cold_start.num_steps larger",
            {"cold_start__enabled": True, "cold_start__num_steps": 9},
            ["cold_start.num_steps larger (now 9)"],
        ),
        ("updates_per_batch lower", {"updates_per_batch": 1}, []),
        ("algorithm.entropy_coef lower", {"algorithm__entropy_coef": 0.0}, []),
        ("sampling.top_p larger", {"sampling__top_p": 1.0}, []),
        ("optimizer.lr to a third", {"optimizer__lr": 1e-3}, ["optimizer.lr to a third (now 0.001)"]),
        ("algorithm.advantage_clip lower", {}, ["algorithm.advantage_clip set"]),
        ("algorithm.target_kl lower", {}, []),  # needs algorithm.kl_coef
        ("curriculum.earlier_share higher", {}, []),  # needs a curriculum
        (
            "curriculum.earlier_share higher",
            {"curriculum__name": "difficulty"},
            ["curriculum.earlier_share higher (now 0.2)"],
        ),
        ("environment.num_train larger | more prompts", {}, ["environment.num_train larger (now 4096)"]),
        ("evaluation.num_prompts larger | more rows", {"evaluation__num_prompts": math.inf}, ["more rows"]),
        ("algorithm.target_kl lower", {"algorithm__kl_coef": 0.1}, ["algorithm.target_kl set"]),
        ("algorithm.mask_truncated=true", {"model__kind": "masked"}, []),
        ("algorithm=cispo", {}, ["algorithm=cispo"]),
        (
            "algorithm=cispo",
            {
                "algorithm__loss": "cispo",
                "algorithm__loss_options.ratio_min": 0.0,
                "algorithm__loss_options.ratio_max": 5.0,
            },
            [],
        ),
        ("algorithm.shaping with soft_overlong", {"algorithm__shaping.soft_overlong.max_len": 9}, []),
        ("algorithm.loss_options.eps_high higher", {"algorithm__loss": "cispo"}, []),
        ("environment.recheck_rate higher", {}, []),  # of another environment
        (
            "environment.recheck_rate higher",
            {"environment__name": "code", "environment__recheck_rate": 0.01},
            ["environment.recheck_rate higher (now 0.01)"],
        ),
        ("the answers themselves", {}, ["the answers themselves"]),
    ],
)
def test_advice_that_a_run_follows_already_or_never_could_is_left_out(
    advice: str, settings: Mapping[str, Any], said: list[str]
) -> None:
    assert open_with(advice, **settings) == said


def test_of_two_ways_the_one_that_a_run_can_go_is_advised() -> None:
    ways = ("environment.num_train larger | more prompts",)
    assert still_open(ways, {"environment.name": "gsm8k"}) == ("more prompts",)
    own = {"environment.name": "countdown", "environment.num_train": 64}
    assert still_open(ways, own | {"data.path": None}) == ("environment.num_train larger (now 64)",)
    assert still_open(ways, own | {"data.path": "rows.jsonl"}) == ("more prompts",)


def test_a_log_without_settings_is_given_all_advice() -> None:
    for rule in RULES:
        assert still_open(rule.advice, {}) == rule.advice


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_some_advice_is_left_to_a_run_that_follows_all_that_has_a_value(rule: Any) -> None:
    settings = dict(SETTINGS)
    for advice in rule.advice:
        name, _, value = advice.partition("=")
        if name in settings:
            settings[name] = {"true": True, "1": 1, "0": 0}.get(value, value)
    left = still_open(rule.advice, settings)
    assert left
    assert not {
        advice for advice in left if re.fullmatch(r"[a-z_.]+=\S+", advice) and advice.partition("=")[0] in settings
    }


EXTRAS: tuple[list[str], ...] = ([], ["data.path=rows.jsonl"], ["data.path=rows.jsonl", "rewards=[module:function]"])
"""What a recipe needs that has no data or no reward of its own, tried in turn."""


def composed(words: list[str]) -> Config:
    """Return the settings of `covey train WORDS`."""
    settings.register()
    with initialize_config_dir(str(settings.CONF), version_base="1.3"):
        config = settings.to_unchecked(compose("config", overrides=words))
    adjust_unset_options(config, {word.partition("=")[0].lstrip("+") for word in words} - {"recipe"})
    validate(config)
    return config


def followed(said: str, config: Config) -> list[str]:
    """Return the words that follow a piece of advice, none where a sentence leaves it to the reader."""
    said = said.partition(" (now ")[0]
    if said.endswith(" set"):
        return [f"{said.removesuffix(' set')}={4 if said.startswith('engine') else 0.5}"]
    if found := VALUE.fullmatch(said):
        return [said]
    if found := KEY.fullmatch(said):
        most = config.sampling.max_tokens
        return [f"+{found['name']}.{found['key']}={{max_len: {most}, cache: {max(1, most // 2)}}}"]
    found = DIRECTION.fullmatch(said)
    given = flat(asdict(config))
    if found is None or isinstance(given.get(found["name"]), list):
        return []
    value, lower = given.get(found["name"]), bool(found["lower"])
    if value is None:
        return [f"++{found['name']}=0.5"]
    if isinstance(value, int):
        return [f"{found['name']}={max(1, value // 2) if lower else 2 * value}"]
    is_share = found["name"].endswith(("share", "rate", "weight"))
    return [f"++{found['name']}={value / 3 if lower else min(1.0, 3 * value) if is_share else 3 * value}"]


def refused(recipe: str, advice: Sequence[str]) -> list[str]:
    """Return what covey refuses of the advice that a run of a recipe is given."""
    base = [f"recipe={recipe}"]
    for words in EXTRAS:
        with suppress(ValueError):
            config = composed(base + words)
            base += words
            break
    lines = []
    for said in still_open(tuple(advice), flat(asdict(config))):
        try:
            after = flat(asdict(composed(base + followed(said, config))))
        except (ValueError, HydraException, OmegaConfBaseException) as error:
            lines.append(f"{said}: {error}")
            continue
        if VALUE.fullmatch(said) and still_open((said,), after):
            lines.append(f"{said}: it changes nothing")
    return lines


ADVICE = sorted({way for rule in RULES for advice in rule.advice for way in advice.split(" | ")})
PRESETS = [advice for advice in ADVICE if VALUE.fullmatch(advice)]


ODD_RECIPES = ("arithmetic", "machines_clamped", "fizzbuzz", "infill_nano")
"""Options of their own, small groups, a masked policy."""


@pytest.mark.parametrize("recipe", ODD_RECIPES)
def test_a_value_or_preset_that_the_doctor_advises_is_taken_by_every_recipe(recipe: str) -> None:
    assert refused(recipe, PRESETS) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(presets("recipe")))
def test_all_that_the_doctor_advises_is_taken_by_every_recipe(recipe: str) -> None:
    assert refused(recipe, ADVICE) == []


def test_losses_that_clip_are_those_that_read_a_range() -> None:
    reads = [
        name
        for name, loss in LOSSES.items()
        if any("eps_high" in inspect.signature(one).parameters for one in (loss.function, loss.selector) if one)
    ]
    assert sorted(reads) == sorted(CLIPPING)


def test_a_finding_advises_what_its_run_has_not_done() -> None:
    log = log_of([{"step": step, "ess_fraction": 0.4} for step in range(1, 61)], settings=SETTINGS)
    (finding,) = diagnose(log, facts_of(SETTINGS))
    assert finding.rule.id == "D25"
    assert finding.advice[0] == "algorithm.correction=truncate"
    assert finding.as_row()["advice"] == list(finding.advice)


def test_findings_that_settings_name_are_those_that_there_are() -> None:
    assert sorted(rule.id for rule in RULES) == sorted(IDS)
    assert set(STOPPERS) < {*IDS, "sick"}


def test_settings_that_a_rule_advises_exist() -> None:
    known = set(setting_names())
    sections = {name.partition(".")[0] for name in known if "." in name}
    words = [word for rule in RULES for advice in rule.advice for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", advice)]
    wrong = [
        word
        for word in words
        if word.partition(".")[0] in sections
        and word not in known
        and not word.startswith(("algorithm.loss_options.", "algorithm.teacher_options."))
    ]
    assert len(words) > 40
    assert wrong == []


@pytest.mark.parametrize("number", [9, 20, 100, 512])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_paired_change_is_as_unsure_as_the_gain_that_covey_prints(number: int, scale: float) -> None:
    before = [scale * (place * 7 % 11 > 5) for place in range(number)]
    after = [scale * (place * 5 % 13 > 5) for place in range(number)]
    gain = paired_gain(before, after, 0.95)
    value, error = paired_change([*before, math.nan], [*after, 0.0])
    assert value == pytest.approx(gain.value)
    if math.isnan(gain.low):
        assert math.isnan(error)
    else:
        assert 2 * 1.959964 * error == pytest.approx(gain.high - gain.low, rel=1e-3)


@pytest.mark.parametrize(
    ("half", "prompts", "said"),
    [
        (0.12, 400, "(+10.0, 95 % [-2.0, 22.0]) on 400 held-out prompts: gain not shown"),
        (0.09, 400, None),
        (0.09, 20, None),
        (0.09, 19, "(+10.0, 95 % [1.0, 19.0]) on 19 held-out prompts: too few to tell"),
    ],
)
def test_how_sure_a_gain_is_is_said_as_the_report_says_it(half: float, prompts: int, said: str | None) -> None:
    gain = {"accuracy": {"value": 0.1, "low": 0.1 - half, "high": 0.1 + half}}
    ends = [{"accuracy": {"value": value}, "num_prompts": prompts} for value in (0.4, 0.5)]
    summary = {"status": "completed", "gain": gain, "before": ends[0], "after": ends[1]}
    rows = [{"step": step, "grad_norm": 0.1} for step in range(1, 61)]
    looks = [{"step": step, "accuracy": accuracy} for step, accuracy in ((0, 0.4), (60, 0.5))]
    found = diagnose(log_of(rows, looks, summary=summary | {NOT_SHOWN: not_shown(summary)}))
    assert [one.evidence.seen for one in found] == ([f"Accuracy 40.0 → 50.0 % {said}"] if said else [])


def test_prompts_that_were_not_held_out_have_one_name() -> None:
    assert doctor.TRAINED == TRAINED
