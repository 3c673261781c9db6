"""Promise 7: no setting is ignored. Another value of any of them changes what can be seen, or is refused by name."""

import ast
import asyncio
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import covey
import covey.config.schema
from covey.algorithm.kl import ESTIMATORS
from covey.algorithm.settings import WITHOUT_CLAMP
from covey.cli.job import UNREAD, check_typed
from covey.cli.main import main
from covey.config.checks import as_typed, format_value, walk
from covey.config.schema import Config, setting_names
from covey.environments.registry import environment_classes
from covey.run.build import build_environment
from covey.system.setting import Requires
from covey_preflight.audit.measure import audit

from ...support.fake_ray import fake_ray
from ...support.small import logging_as_it_was, words
from .settings_cases import CASES, COLD, HERE, OFF, PREFLIGHT, SECOND_READERS, Case, Observation, Refused, Settings
from .settings_filled import filled_cases, is_quick
from .settings_infill import INFILL, judges
from .settings_observed import alike, evaluation, policy, warm_up
from .settings_watched import checks
from .settings_world import configured, connect, make_world

NAMES = list(dict.fromkeys(setting_names()))
SETTINGS = [name for name in NAMES if not any(other.startswith(f"{name}.") for other in NAMES)]


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch, logging_as_it_was():
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        connect(patch, folder)
        make_world(folder)
        yield
    sys.modules.pop("observed_rewards", None)


def observed(observe: Observation, settings: dict[str, Any]) -> Any:
    return observe(configured(settings))


WAITING = ("environment.cpu_seconds", "environment.total_seconds", "timeouts.tracker")
"""Limits in seconds that are waited for, each some 10 s."""
USUAL: dict[tuple[Observation, str], Any] = {}
"""What was seen under settings that many cases share."""
REPEATED: set[Observation] = set()
"""Observations that were made twice in the same way."""


def usually(observe: Observation, settings: Mapping[str, Any]) -> Any:
    """Return what is seen under these settings, looked at twice when an observation is made for the first time."""
    key = (observe, repr(sorted(settings.items())))
    if key not in USUAL:
        USUAL[key] = observed(observe, dict(settings))
        if observe not in REPEATED:
            assert alike(USUAL[key], observed(observe, dict(settings))), "the observation does not repeat itself"
            REPEATED.add(observe)
    return USUAL[key]


def assert_matters(name: str, case: Case) -> None:
    changed = {**case.context, **case.along, name: case.value}
    before = usually(case.observe, case.context)
    assert not alike(before, observed(case.observe, changed)), f"{name}={case.value} changes nothing"
    if case.keeps is not None:
        assert alike(usually(case.keeps, case.context), observed(case.keeps, changed), tolerance=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in WAITING else []) for name in SETTINGS]
)
def test_another_value_of_a_setting_changes_what_can_be_seen_or_is_refused(name: str) -> None:
    if name not in CASES:
        pytest.fail(f"{name} is new: say in settings_cases.py what another value of it changes", pytrace=False)
    case = CASES[name]
    if isinstance(case, Case):
        assert_matters(name, case)
        return
    with pytest.raises(ValueError) as refusal:
        policy(configured({name: case.value}))
    assert str(refusal.value) == case.line


@pytest.mark.parametrize(
    "reader",
    [
        pytest.param(reader, marks=pytest.mark.slow if reader == "environment.timeout of code" else [])  # waits 10 s
        for reader in SECOND_READERS
    ],
)
def test_a_setting_matters_also_where_only_its_second_reader_is_there(reader: str) -> None:
    assert_matters(reader.partition(" of ")[0], SECOND_READERS[reader])


FILLED = filled_cases()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if is_quick(name, case) else pytest.mark.slow) for name, case in FILLED.items()],
)
def test_a_setting_matters_as_much_where_the_policy_fills_in(name: str) -> None:
    assert_matters(name, FILLED[name])


CONTEXTS = {(case.observe, repr(case.context)): name for name, case in CASES.items() if isinstance(case, Case)}
"""The last setting that is looked at so."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTEXTS.values())
def test_an_observation_repeats_itself_in_every_context(name: str) -> None:
    case = CASES[name]
    assert isinstance(case, Case)
    first, second = (observed(case.observe, dict(case.context)) for _ in range(2))
    assert alike(first, second)


def test_every_case_is_of_a_setting() -> None:
    assert set(CASES) <= set(SETTINGS)


# ------------------------------------------------------------------------------------------------ refusals


SAID_OF_THE_OTHER = {("algorithm.kl_in", "a sampled algorithm.kl_estimator such as k1")}
"""Conflicts that are conditions of both settings, so that either gives way: the line is about the one checked first."""
RULES = list(
    dict.fromkeys(
        (found.name, need)
        for environment in environment_classes().values()
        for found in walk(Config(environment=environment()))
        for need in found.bounds.needs
        if (found.name, need.condition) not in SAID_OF_THE_OTHER
    )
)


@pytest.mark.parametrize(("name", "rule"), RULES, ids=[f"{name}, {rule.condition}" for name, rule in RULES])
def test_a_setting_is_refused_where_nothing_would_read_it(name: str, rule: Requires) -> None:
    case = CASES[name]
    along = case.along if isinstance(case, Case) else {}
    value = case.value if rule.value is None else rule.value
    with pytest.raises(ValueError) as refusal:
        configured({**OFF.get(rule.condition, {}), **along, name: value})
    partner = as_typed(rule.partners[0])
    assert str(refusal.value).startswith(f"{name}={format_value(value)} needs {rule.condition}, got {partner}=")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"model.name": "policy", "model.revision": "main"},
            "model.revision=main needs model.name = a hub name, got model.name=policy",
        ),
        (
            {"algorithm.kl_coef": 1.0, "algorithm.kl_estimator": "full", "algorithm.kl_clamp": 5.0},
            "algorithm.kl_clamp=5.0 needs a KL penalty with an exponential (k3 or is_weighted), "
            "got algorithm.kl_coef=1.0, algorithm.kl_estimator=full, algorithm.kl_gradient=straight_through_k2, "
            "algorithm.sampler_kl_coef=0.0, algorithm.sampler_kl_estimator=k3",
        ),
        (HERE | {"data.path": "splits", "data.test_fraction": 0.3}, "data.test_fraction=0.3 needs data without a test"),
        (HERE | {"data.path": "splits", "data.test_split": "tset"}, "data.test_split=tset names no split of splits"),
        ({"output.keep_last": 0}, "output.keep_last must be >= 1, got 0"),
    ],
)
def test_what_would_be_ignored_is_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        build_environment(configured(settings))
    assert str(refusal.value).startswith(line)


def test_rows_of_one_split_are_never_trained_on_and_tested_on() -> None:
    found = build_environment(configured(HERE | {"data.path": "splits", "data.test_split": "train"}))
    texts = [{prompt.text for prompt in found.prompts(split)} for split in ("train", "test")]
    assert [len(part) for part in texts] == [5, 1]
    assert not texts[0] & texts[1]


def test_the_kl_estimators_of_the_rules_are_those_of_the_formulas() -> None:
    assert set(WITHOUT_CLAMP) == {*ESTIMATORS, "full"} - {"k3", "k3_forward"}


# ------------------------------------------------------------------------------------------------ the command line


def covered(settings: tuple[str, ...]) -> list[str]:
    """The settings of a list of names and sections."""
    return [name for name in SETTINGS if name in settings or any(name.startswith(f"{s}.") for s in settings)]


def audited(config: Config) -> Any:
    """What an audit of the first rows says of the grader."""
    environment = build_environment(config)
    try:
        return asyncio.run(audit(environment, "train", 4)).rows()
    finally:
        environment.close()


VERBS: dict[str, tuple[Observation, Settings]] = {
    "check": (checks, PREFLIGHT),
    "evaluate": (evaluation, {}),
    "cold-start": (warm_up, COLD),
    "judge": (judges, INFILL),
    "audit": (audited, HERE),
}


@dataclass
class Unread:
    """Settings that a verb is said not to read, as many at once as no rule refuses."""

    usual: dict[str, Any]
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the name of the setting: its other value, and what has to be along with it."""

    def changed(self) -> dict[str, Any]:
        return self.usual | {key: value for change in self.changes.values() for key, value in change.items()}

    def take(self, name: str, usual: Mapping[str, Any], change: Mapping[str, Any]) -> bool:
        """Add a setting where it fits: a rule refuses it where another one would keep it from being read."""
        seen_before = {key for one in self.changes.values() for key in one}
        if seen_before & usual.keys() or (change.keys() & {*seen_before, *self.usual}):
            return False
        if any(self.usual.get(key, value) != value for key, value in usual.items()):
            return False
        try:
            configured({**self.usual, **usual})
            configured({**self.changed(), **usual, **change})
        except ValueError:
            return False
        self.usual |= usual
        self.changes[name] = dict(change)
        return True


def unread_by(verb: str) -> list[Unread]:
    found: list[Unread] = []
    for name in covered(UNREAD[verb]):
        case = CASES[name]
        if isinstance(case, Refused):
            continue
        usual = {**VERBS[verb][1], **({} if "environment.name" in case.context else case.context)}
        change = {**case.along, name: case.value}
        if not any(together.take(name, usual, change) for together in found):
            found.append(Unread(usual, {name: change}))
    return found


@pytest.mark.long
@pytest.mark.parametrize("verb", UNREAD)
def test_what_a_verb_is_said_not_to_read_changes_nothing_of_it(verb: str) -> None:
    def observe(config: Config) -> Any:
        with fake_ray():
            return VERBS[verb][0](config)

    for together in unread_by(verb):
        before = observed(observe, dict(together.usual))
        if not alike(before, observed(observe, together.changed())):
            alone = {name: observed(observe, together.usual | change) for name, change in together.changes.items()}
            read = [name for name, seen in alone.items() if not alike(before, seen)]
            pytest.fail(f"{verb} reads {read}, or some of {list(alone)} together")


@pytest.mark.parametrize("verb", ["train", "config", "check"])
def test_a_typed_setting_of_a_cold_start_that_is_off_is_refused(verb: str) -> None:
    line = r"^cold_start\.num_steps=4 needs cold_start\.enabled=true, got cold_start\.enabled=false$"
    with pytest.raises(ValueError, match=line):
        check_typed(verb, configured(COLD), ["seed=1", "cold_start.num_steps=4"], num_processes=1)
    assert check_typed(verb, configured({**COLD, "cold_start.enabled": True}), ["cold_start.num_steps=4"], 1) == []
    # A recipe's settings of a cold start that was switched off are nobody's mistake.
    assert check_typed(verb, configured(COLD), ["recipe=arithmetic", "cold_start.enabled=false"], 1) == []
    assert check_typed("cold-start", configured(COLD), ["cold_start.num_steps=4"], 1) == []


def test_typed_settings_that_a_verb_does_not_read_are_named() -> None:
    typed = ["algorithm=dr_grpo", "+algorithm.loss_options.eps_low=0.1", "seed=1", "evaluation.k=[1]", "num_steps=3"]
    unread = ["algorithm", "algorithm.loss_options.eps_low", "num_steps"]
    assert check_typed("evaluate", configured({}), typed, 1) == unread
    assert check_typed("cold-start", configured({}), typed, 1) == [*unread[:2], "evaluation.k", "num_steps"]
    assert check_typed("train", configured({}), typed, 1) == []


def test_one_process_is_told_that_it_reads_no_settings_of_several() -> None:
    typed = ["parallel.strategy=fsdp", "timeouts.ranks=60"]
    assert check_typed("train", configured({}), typed, num_processes=1) == ["parallel.strategy", "timeouts.ranks"]
    assert check_typed("train", configured({}), typed, num_processes=2) == []


@pytest.mark.long
def test_the_command_says_what_it_does_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    small = words(environment__num_train=16, environment__num_test=8)
    typed = [word for word in small if not word.startswith(("num_steps", "groups_per_step", "group_size"))]
    assert main(["evaluate", *typed, "hydra.run.dir=unread"]) == 0
    assert capsys.readouterr().err == "WARNING: covey evaluate in one process does not read optimizer.lr\n"
    assert main(["train", *typed, "cold_start.lr=0.1", "hydra.run.dir=refused"]) == 2
    line = "covey: cold_start.lr=0.1 needs cold_start.enabled=true, got cold_start.enabled=false\n"
    assert capsys.readouterr().err == line
    assert not Path("refused/config.yaml").exists()


SOURCE = Path(covey.__file__).parents[1]


@pytest.mark.long
def test_every_setting_is_read_somewhere() -> None:
    """As an attribute, or by its whole name."""
    schema = (
        *("schema.py", "environments.py", "checks.py", "lazy_weights.py", "compose.py", "names.py"),
        *("settings.py", "saved_settings.py"),
    )
    files = [path for path in SOURCE.rglob("*.py") if path.name not in schema and path.parent.name != "rules"]
    trees: list[ast.AST] = [ast.parse(path.read_text()) for path in files]
    for path in (Path(covey.config.schema.__file__), *SOURCE.rglob("settings.py")):  # properties, and what builds
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        trees += [node for node in functions if node.name != "check"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    named = {node.value for node in nodes if isinstance(node, ast.Constant)}
    assert [name for name in SETTINGS if name.rpartition(".")[2] not in read and name not in named] == []
