"""A run folder of somebody else runs nothing and writes nowhere; one of your own needs no word for it."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.cluster.settings import DevicesConfig
from covey.config.compose import to_yaml
from covey.config.schema import Config, OutputConfig
from covey.config.validate import validate
from covey.environments.data.rows import load_rows
from covey.environments.data.settings import DataConfig
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.reward_functions.specs import load_reward
from covey.environments.settings import CustomConfig, MixtureConfig
from covey.loop import train
from covey.run import trust
from covey.run.checkpoints.manifest import render
from covey.run.checkpoints.resume import log_setting_changes, run_lock
from covey.run.folder import LogFile, changes_of, create_run_folder, write_num_steps
from covey.system.jsonl import write_json
from covey.system.lookup import resolve
from covey_integrations.settings import AgentConfig, OpenEnvConfig, StepsConfig, VerifiersConfig
from covey_integrations.tools.settings import ToolsConfig
from covey_tasks.code.settings import CodeConfig
from covey_tasks.infill.settings import InfillConfig
from covey_tasks.math.settings import Gsm8kConfig

from ..support.small import logging_as_it_was, small_config, words

POLICY = "checkpoints/step-000002/policy"
MARK = """
from pathlib import Path

def f(*values, **more):
    Path("PWNED").touch()
    return []

f()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder beside modules that leave a mark when they are imported, and a home of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("evil", "evil two"):
        Path(f"{name}.py").write_text(MARK)
    with logging_as_it_was():
        yield
    for name in ("evil", "own"):
        sys.modules.pop(name, None)


def foreign(config: Config, name: str = "theirs") -> Path:
    """A run folder as it came from elsewhere: settings, a checkpoint, a policy."""
    run = Path(name)
    (run / POLICY).mkdir(parents=True)
    (run / POLICY / "config.json").write_text("{}")
    (run / POLICY / "../manifest.json").write_text("{}")
    (run / "config.yaml").write_text(to_yaml(config))
    return run


def with_rows(**changes: Any) -> Config:
    config = Config(environment=RewardFunctionsConfig(), rewards=["accuracy"], data=DataConfig(path="rows.jsonl"))
    vars(config).update(changes)
    return config


def with_algorithm(**changes: Any) -> Config:
    config = Config()
    vars(config.algorithm).update(changes)
    return config


NAMING: dict[str, tuple[Config, str]] = {
    "a reward": (with_rows(rewards=["evil:f"]), "rewards=evil:f"),
    "a reward with arguments": (
        with_rows(rewards=["accuracy", {"function": "evil:f", "args": {"args": ["touch", "PWNED"]}}]),
        "rewards.function=evil:f",
    ),
    "an attribute of a module": (with_rows(rewards=["evil:os.system"]), "rewards=evil:os.system"),
    "a module with a blank in its name": (with_rows(rewards=["evil two:f"]), "rewards=evil two:f"),
    "the standard library": (with_rows(rewards=["subprocess:Popen"]), "rewards=subprocess:Popen"),
    "covey itself": (
        Config(environment=CustomConfig(factory="covey.cli.main:main", options={"argv": ["train"]})),
        "environment.factory=covey.cli.main:main",
    ),
    "an environment": (Config(environment=CustomConfig(factory="evil:f")), "environment.factory=evil:f"),
    "a program with tools": (
        Config(environment=ToolsConfig(servers=["touch PWNED"]), rewards=["accuracy"], data=DataConfig("rows.jsonl")),
        "servers=touch PWNED",
    ),
    "a tool": (
        Config(environment=ToolsConfig(tools=["evil:f"]), rewards=["accuracy"], data=DataConfig("rows.jsonl")),
        "environment.tools=evil:f",
    ),
    "a factory of games": (Config(environment=StepsConfig(factory="evil:f")), "environment.factory=evil:f"),
    "data": (with_rows(data=DataConfig(path="evil:f")), "data.path=evil:f"),
    "a part of a mixture": (
        Config(environment=MixtureConfig(parts={"one": CustomConfig(factory="evil:f")})),
        "environment.parts.one.factory=evil:f",
    ),
    "data of a part": (
        Config(environment=MixtureConfig(parts={"one": Gsm8kConfig()}, data={"one": DataConfig(path="evil:f")})),
        "environment.data.one.path=evil:f",
    ),
    "an advantage": (with_algorithm(advantage="evil:f"), "algorithm.advantage=evil:f"),
    "a loss": (with_algorithm(loss="evil:f"), "algorithm.loss=evil:f"),
    "a shaping": (with_algorithm(shaping={"evil:f": {}}), "algorithm.shaping=evil:f"),
    "a selection": (with_algorithm(selection="evil:f"), "algorithm.selection=evil:f"),
    "a filter": (with_algorithm(group_filter="evil:f"), "algorithm.group_filter=evil:f"),
    "no sandbox": (
        Config(environment=CodeConfig(isolation="unsafe_no_isolation")),
        "isolation=unsafe_no_isolation",
    ),
    "a program of an agent": (
        with_rows(environment=AgentConfig(command=["touch", "PWNED"])),
        "command=touch, command=PWNED",
    ),
    "an interpreter and a module of verifiers": (
        Config(environment=VerifiersConfig(id="evil", python="./evil.sh")),
        "id=evil, python=./evil.sh",
    ),
    "an interpreter of samplers and a cluster": (
        Config(devices=DevicesConfig(python="./evil.sh", address="evil.example:6379")),
        "python=./evil.sh, address=evil.example:6379",
    ),
    "a tracker": (Config(output=OutputConfig(trackers=["wandb"], wandb_project="theirs")), "trackers=wandb"),
    "data of a hub": (with_rows(data=DataConfig(path="someone/rows")), "path=someone/rows"),
    "data at an address": (with_rows(data=DataConfig(path="hf://someone/rows.jsonl")), "path=hf://someone/rows.jsonl"),
    "a reference of a hub": (
        with_algorithm(reference_model="someone/large", kl_coef=0.1),
        "reference_model=someone/large",
    ),
    "a server as teacher": (with_algorithm(teacher="http://evil.example"), "teacher=http://evil.example"),
    "a judge of a hub": (Config(environment=InfillConfig(judge="someone/judge")), "judge=someone/judge"),
    "a reward model of a hub": (
        with_rows(rewards=[{"function": "reward_model", "args": {"model": "someone/judge"}}]),
        "model=someone/judge",
    ),
    "a server": (
        Config(environment=OpenEnvConfig(url="http://evil.example")),
        "url=http://evil.example",
    ),
    "a variable of the environment": (
        with_rows(reward_weights=[1.0], data=DataConfig(path="x")),
        "path=${oc.env:HOME}",
    ),
}
ALSO_MEASURED = ("a reward", "an environment", "a variable of the environment")
"""What is tried by two commands, which look for the same with the same function."""
COMMANDS: dict[str, list[str]] = {
    "evaluate": ["evaluate", f"model.name=theirs/{POLICY}"],
    "resume": ["train", "resume=theirs"],
    "config": ["config", "resume=theirs"],
    "again": ["train", "--config", "theirs/config.yaml"],
    "evaluate again": ["evaluate", "--config=theirs/config.yaml", f"model.name=theirs/{POLICY}"],
    "a file": ["train", "--config", "saved.yaml"],
}


def assert_nothing_happened(capsys: pytest.CaptureFixture[str], source: str, risk: str) -> None:
    printed = capsys.readouterr()
    assert printed.err == (
        f"covey: {source} was not created by you here, and its settings run code or reach out: {risk}; review them, "
        "then pass trust_run=true, or type your own settings instead\n"
    )
    assert not Path("PWNED").exists()
    assert "evil" not in sys.modules
    assert not list(Path().glob("outputs/*"))


@pytest.mark.parametrize("what", NAMING)
def test_what_a_foreign_run_names_is_not_loaded(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, risk = NAMING[what]
    run = foreign(config)
    if "${" in risk:
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace("path: x\n", "path: ${oc.env:HOME}\n"))
    for command in ("evaluate", "resume") if what in ALSO_MEASURED else ("resume",):
        assert main(COMMANDS[command]) == 2
        assert_nothing_happened(capsys, "theirs", risk)


@pytest.mark.parametrize(
    ("command", "source"),
    [
        ("config", "theirs"),
        ("again", "theirs/config.yaml"),
        ("evaluate again", "theirs/config.yaml"),
        ("a file", "saved.yaml"),
    ],
)
def test_no_way_of_naming_its_settings_loads_it(command: str, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = foreign(with_rows(rewards=["evil:f"]))
    shutil.copy(run / "config.yaml", "saved.yaml")
    assert main(COMMANDS[command]) == 2
    assert_nothing_happened(capsys, source, "rewards=evil:f")


UNUSUAL = (
    "evil:1",
    "evil:f-x",
    "evil:f x",
    "evil: f",
    "evil:",
    "evil:f:",
    "evil:f\n",
    "ev\nil:f",
    "evil:\nf",
    "evil::f",
)
"""Names that look like no function, of modules that are there."""


@pytest.mark.parametrize("name", UNUSUAL)
def test_no_other_spelling_of_a_name_is_imported(name: str) -> None:
    Path("ev\nil.py").write_text(MARK)
    loaders: list[Callable[[], object]] = [
        lambda: resolve(name, {}),
        lambda: load_reward(name),
        lambda: load_reward({"function": name, "args": {}}),
        lambda: validate(with_rows(rewards=[name])),
        lambda: validate(Config(environment=CustomConfig(factory=name))),
        lambda: validate(with_algorithm(advantage=name)),
        lambda: validate(with_algorithm(shaping={name: {}})),
        lambda: load_rows(name),
    ]
    for load in loaders:
        with pytest.raises(ValueError):
            load()
        assert not Path("PWNED").exists()
        assert not {"evil", "ev\nil"} & set(sys.modules)


@pytest.mark.long
def test_nor_is_it_where_a_foreign_run_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    foreign(with_rows(rewards=["evil:1"], data=DataConfig(path="evil:1")))
    for command in ("evaluate", "resume"):
        assert main(COMMANDS[command]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not Path("PWNED").exists()


@pytest.mark.long
def test_nor_is_what_it_names_among_later_changes(capsys: pytest.CaptureFixture[str]) -> None:
    run = foreign(with_rows())
    change = {"after_step": 1, "changes": {"rewards": {"from": ["accuracy"], "to": ["evil:f"]}}}
    (run / "changes.jsonl").write_text(json.dumps(change) + "\n")
    for command in ("evaluate", "resume", "config"):
        assert main(COMMANDS[command]) == 2
        assert_nothing_happened(capsys, "theirs", "rewards=evil:f")


@pytest.mark.long
def test_a_foreign_run_cannot_trust_itself(capsys: pytest.CaptureFixture[str]) -> None:
    run = foreign(with_rows(rewards=["evil:f"], trust_run=True))
    assert "trust_run: true" in (run / "config.yaml").read_text()
    for seal in (None, "", "0" * 64, "x" * 5000):
        if seal is not None:
            (run / trust.SEAL).write_text(seal)
        for command in ("evaluate", "resume", "again"):
            assert main(COMMANDS[command]) == 2
            assert "was not created by you here" in capsys.readouterr().err
    assert not Path("PWNED").exists()


def test_a_seal_of_another_run_or_of_another_person_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = create_run_folder(Path("mine"), to_yaml(Config()), exact=True)
    assert trust.is_own(mine)
    run = foreign(with_rows(rewards=["evil:f"]))
    shutil.copy(mine / trust.SEAL, run)
    assert not trust.is_own(run)
    monkeypatch.setenv("XDG_STATE_HOME", "theirs_at_home")
    trust.seal(run)
    assert trust.is_own(run)
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert not trust.is_own(run)


def test_a_seal_ends_with_changed_settings_or_a_link_out_of_the_run() -> None:
    run = create_run_folder(Path("mine"), to_yaml(Config()), exact=True)
    for change in (
        lambda: (run / "changes.jsonl").write_text("{}\n"),
        lambda: (run / "changes.jsonl").write_text('{"after_step": 1}\n'),
        lambda: (run / "config.yaml").write_text("seed: 1\n"),
        lambda: (run / "notes").symlink_to("/etc/hostname"),
    ):
        assert trust.is_own(run)
        change()
        assert not trust.is_own(run)
        trust.seal(run)
    (run / "metrics.jsonl").touch()
    (run / "newest").symlink_to("metrics.jsonl")
    assert trust.is_own(run), "what a run writes, and links inside of it"


def test_a_computed_number_of_steps_is_sealed_in_a_run_of_your_own_alone() -> None:
    mine = create_run_folder(Path("mine"), "num_steps: null\n", exact=True)
    Path("theirs").mkdir()
    Path("theirs/config.yaml").write_text("num_steps: null\n")
    for run, is_own in ((mine, True), (Path("theirs"), False)):
        write_num_steps(run, 7)
        assert (run / "config.yaml").read_text() == "num_steps: 7\n"
        assert trust.is_own(run) is is_own


def test_changes_of_a_resume_are_sealed_in_a_run_of_your_own_alone() -> None:
    mine = create_run_folder(Path("mine"), to_yaml(Config()), exact=True)
    Path("theirs").mkdir()
    shutil.copy(mine / "config.yaml", "theirs")
    for run, is_own in ((mine, True), (Path("theirs"), False)):
        checkpoint = run / "checkpoints" / "step-000002"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(render(2, {"prompts": "p"}, {}))
        log_setting_changes(Config(seed=5), run, checkpoint, "p")
        (line,) = changes_of(run)
        assert line == {"after_step": 2, "changes": {"seed": {"from": 0, "to": 5}}}
        assert trust.is_own(run) is is_own


@pytest.mark.parametrize(
    ("settings", "risk"),
    [
        ({"data": {"path": "rows/${oc.env:HOME}"}}, "path=rows/${oc.env:HOME}"),
        ({"devices": [{"note": "of ${oc.env:USER}"}]}, "note=of ${oc.env:USER}"),
        ({"model": {"code": "folder"}}, "code=folder"),
    ],
)
def test_a_risk_is_found_wherever_it_stands(settings: dict[str, Any], risk: str) -> None:
    assert [shown for shown, _ in trust.find_risks(settings)] == [risk]


def test_each_name_that_acts_or_fetches_is_a_risk() -> None:
    acts = ["url", "servers", "address", "command", "python", "id", "trackers"]
    fetches = ["path", "reference_model", "teacher", "model", "judge"]
    settings = dict.fromkeys((*acts, *fetches, "name", "recipe"), "some/where")
    assert [shown for shown, _ in trust.find_risks(settings)] == [f"{name}=some/where" for name in (*acts, *fetches)]


def test_code_is_named_by_the_keys_of_a_table_too() -> None:
    settings = {"rewards": ["own:f"], "algorithm": {"shaping": {"os:system": {}}}, "kinds": "a:b"}
    assert list(trust.named_code(settings)) == [("rewards", "own:f"), ("algorithm.shaping", "os:system")]


def test_settings_are_trusted_that_are_typed_or_the_sealed_ones_of_an_own_run() -> None:
    mine = create_run_folder(Path("mine"), to_yaml(Config()), exact=True)
    settings = {"rewards": ["evil:f"], "environment": {"url": "http://a"}}
    for source in (mine, mine / "config.yaml"):
        trust.check(source, settings, [], trusted=False)
    other = mine / "other.yaml"
    trust.check(other, settings, ["evil:f", "http://a"], trusted=False)
    trust.check(other, settings, [], trusted=True)
    for typed, risks in (
        ((), "rewards=evil:f, url=http://a"),
        (("evil:f",), "url=http://a"),
        (("http://a",), "rewards=evil:f"),
    ):
        with pytest.raises(ValueError, match=f"or reach out: {risks}; review"):
            trust.check(other, settings, typed, trusted=False)


def test_code_beside_weights_runs_only_where_the_run_is_own_or_trusted() -> None:
    mine, theirs = create_run_folder(Path("mine"), to_yaml(Config()), exact=True), foreign(Config())
    trust.check_code(mine / POLICY, mine, "folder", trusted=False)
    trust.check_code(theirs / POLICY, theirs, "folder", trusted=True)
    trust.check_code(theirs / POLICY, theirs, "transformers", trusted=False)
    with pytest.raises(ValueError, match=r"^theirs/.* is of a run that you did not make here, and model.code=folder"):
        trust.check_code(theirs / POLICY, theirs, "folder", trusted=False)


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_a_key_that_others_can_read_is_none(mode: int) -> None:
    run = create_run_folder(Path("mine"), to_yaml(Config()), exact=True)
    trust.key_file().chmod(mode)
    assert not trust.is_own(run)


def test_a_home_that_cannot_be_written_stops_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/no")
    assert not trust.is_own(create_run_folder(Path("mine"), to_yaml(Config()), exact=True))


# ------------------------------------------------------------------------------------------------ your own


OWN = (
    *words(num_steps=1),
    *("environment=reward_functions", "environment.in_process=true", "rewards=[own:short]", "data.path=rows.jsonl"),
    *("preflight.enabled=false", "output.progress=false"),
)


def own_run(folder: str = "mine") -> Path:
    body = "(completions, **more):\n    return [1.0 / len(c + '.') for c in completions]\n"
    Path("own.py").write_text(f"def short{body}\n\ndef long{body}")
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"number {n}: "}) + "\n" for n in range(20)))
    assert main(["train", *OWN, f"hydra.run.dir={folder}"]) == 0
    return Path(folder)


@pytest.mark.long
def test_runs_of_your_own_are_resumed_measured_and_started_again_with_what_they_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own_run()
    shutil.move("mine", "elsewhere")
    capsys.readouterr()
    more = ["num_steps=2", "resume_changes=[num_steps]"]
    assert main(["train", "resume=elsewhere", *more]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "imports rewards=own:short"
    assert main(["evaluate", "model.name=elsewhere/checkpoints/step-000002/policy", "hydra.run.dir=look"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "imports rewards=own:short"
    assert main(["train", "--config", "elsewhere/config.yaml", "seed=1", "num_steps=1", "hydra.run.dir=again"]) == 0
    assert "\nseed: 1\n" in "\n" + Path("again/config.yaml").read_text()
    assert trust.is_own(Path("again"))


@pytest.mark.long
def test_a_run_that_was_changed_needs_a_word_once(capsys: pytest.CaptureFixture[str]) -> None:
    run = own_run()
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("own:short", "own:long"))
    more = ["num_steps=2", "resume_changes=[num_steps]"]
    assert main(["train", "resume=mine", *more]) == 2
    assert "its settings run code or reach out: rewards=own:long; review them" in capsys.readouterr().err
    assert main(["train", "resume=mine", "trust_run=true", *more]) == 0
    assert trust.is_own(run)
    assert main(["train", "resume=mine", "num_steps=3", "resume_changes=[num_steps]"]) == 0


@pytest.mark.long
def test_what_you_type_is_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    foreign(with_algorithm(advantage="evil:f"))
    for word in ("algorithm.advantage=evil:f", "algorithm.advantage=group_center", "trust_run=true"):
        trusted = ["resume_changes=[algorithm]"] if word.endswith("center") else []
        assert main(["config", "resume=theirs", word, *trusted]) == 0, capsys.readouterr().err
    assert main(["config", "trust_run=true"]) == 2
    assert capsys.readouterr().err == (
        "covey: trust_run=true needs resume=RUN, --config FILE, hydra.run.dir=FOLDER or the policy of a run, "
        "got none of them\n"
    )


@pytest.mark.long
def test_caches_of_other_users_are_not_written() -> None:
    config = Config()
    config.cold_start.cache_dir = "/home/somebody/cache"
    run = foreign(config)
    assert main(["train", "--config", str(run / "config.yaml"), "num_steps=0"]) == 2
    from covey.run.checkpoints.saved_settings import settings_of

    assert settings_of(run, ["resume=theirs"]).cold_start.cache_dir == Config().cold_start.cache_dir
    assert settings_of(run, ["trust_run=true"]).cold_start.cache_dir == "/home/somebody/cache"


# ------------------------------------------------------------------------------------------------ links


FILES = ("rollouts.jsonl", "metrics.jsonl", "covey.log", "run.lock", "versions.json", "summary.json", "tensorboard/x")


def linked(run: Path, name: str) -> Path:
    victim = Path("victim.txt")
    victim.write_text("precious\n")
    file = run / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(victim.absolute())
    return victim


@pytest.mark.parametrize("name", FILES)
def test_links_of_a_foreign_run_are_not_followed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = foreign(small_config())
    victim = linked(run, name)
    assert main(["train", "resume=theirs"]) == 2
    assert capsys.readouterr().err == (
        f"covey: theirs is not a run that you made here, and links lead out of it: theirs/{name} -> "
        f"{victim.absolute()}; trust_run=true follows them\n"
    )
    with pytest.raises(ValueError, match="links lead out of it"):
        train(small_config(resume="theirs"), run)
    assert victim.read_text() == "precious\n"


WRITTEN = (
    *("covey.log", "metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl", "traces.jsonl", "updates.jsonl"),
    *("schedule.jsonl", "status.json", "run.lock", "run.seal", "summary.json", "versions.json", "changes.jsonl"),
    *("preflight.json", "report.html", "checkpoints", "checkpoints/step-000001", "tensorboard", "wandb"),
)


@pytest.mark.product
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("exact", [True, False])
def test_links_that_lie_where_a_new_run_would_write_are_refused(name: str, exact: bool) -> None:
    run = Path("new")
    run.mkdir()
    victim = linked(run, name)
    with pytest.raises(ValueError, match=r"links lead out of it: .* -> .*; trust_run=true follows them"):
        create_run_folder(run, to_yaml(Config()), exact=exact)
    assert victim.read_text() == "precious\n"
    assert {path.name for path in run.iterdir()} == {name.partition("/")[0]}


@pytest.mark.parametrize("name", ["run.seal", "config.yaml", "summary.json.partial", "run.seal.partial"])
def test_symbolic_links_are_not_followed(name: str) -> None:
    """Also where they come after all looks."""
    victim = linked(Path(), name)
    with suppress(OSError, ValueError):
        create_run_folder(Path(), to_yaml(Config()), exact=True, trusted=True)
    trust.seal(Path())
    write_json(Path("summary.json"), {})
    assert victim.read_text() == "precious\n"


def test_a_lock_and_a_log_are_never_opened_through_a_link() -> None:
    victim = linked(Path(), "run.lock")
    linked(Path(), "covey.log")
    with suppress(OSError), run_lock(Path()):
        pass
    LogFile(Path("covey.log")).write("x")
    assert victim.read_text() == "precious\n"


def test_a_folder_with_links_of_its_own_may_become_a_run() -> None:
    run = Path("new")
    run.mkdir()
    (run / "venv").symlink_to("/usr")
    (run / "kept").mkdir()
    (run / "kept" / "x.json").symlink_to("/usr/bin/env")
    assert create_run_folder(run, to_yaml(Config()), exact=True) == run


@pytest.mark.long
def test_links_planted_in_the_own_run_are_not_followed(capsys: pytest.CaptureFixture[str]) -> None:
    run = own_run()
    victim = linked(run, "rollouts.jsonl")
    more = ["num_steps=2", "resume_changes=[num_steps]"]
    assert main(["train", "resume=mine", *more]) == 2
    assert victim.read_text() == "precious\n"
    assert main(["train", "resume=mine", "trust_run=true", *more]) == 0
    assert victim.read_text() != "precious\n"
    assert trust.is_own(run)


@pytest.mark.long
def test_links_inside_a_run_lead_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    run = own_run()
    (run / "newest").symlink_to("checkpoints/step-000001")
    assert main(["train", "resume=mine", "num_steps=2", "resume_changes=[num_steps]"]) == 0


@pytest.mark.long
def test_wandbs_own_log_links_are_trusted_and_other_links_are_not() -> None:
    run = own_run()
    logs = run / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(Path("cache.log").absolute())
    assert trust.is_own(run)
    trust.check_links(run, run, trusted=False)
    (run / "wandb" / "covey_run_id").symlink_to(Path("secret").absolute())
    assert not trust.is_own(run)
    with pytest.raises(ValueError, match="links lead out of it: mine/wandb/covey_run_id -> "):
        trust.check_links(run, run, trusted=False)


@pytest.mark.long
def test_a_policy_whose_files_are_elsewhere_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    run = foreign(Config())
    secret = Path("secret.json").absolute()
    secret.write_text("{}")
    (run / POLICY / "tokenizer.json").symlink_to(secret)
    for verb in ("evaluate", "train", "check"):
        assert main([verb, "recipe=arithmetic", f"model.name=theirs/{POLICY}"]) == 2
        assert f"links lead out of it: theirs/{POLICY}/tokenizer.json -> {secret}" in capsys.readouterr().err


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["covey.log", "metrics.jsonl", "run.lock", "x/y"])
def test_a_pipe_in_a_run_folder_is_refused_and_not_waited_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = foreign(Config())
    (run / name).parent.mkdir(exist_ok=True)
    os.mkfifo(run / name)
    assert main(["train", "resume=theirs", "trust_run=true"]) == 2
    assert capsys.readouterr().err == f"covey: theirs/{name} is neither a file nor a folder; remove it\n"


# ------------------------------------------------------------------------------------------------ broken settings


def spoiled(text: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(text)


def behind_a_link(file: Path) -> None:
    file.rename("elsewhere.yaml")
    file.symlink_to(Path("elsewhere.yaml").absolute())


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bracket": (spoiled("seed: [1\nnum_steps: 3\n"), "cannot be read: line 2: did not find expected ',' or ']'"),
    "a tab": (spoiled("seed:\n\t- 1\n"), "cannot be read: line 2: indent by blanks, not by a tab"),
    "text": (spoiled("nothing"), "does not hold all settings of a run"),
    "a list": (spoiled("- seed\n"), "does not hold all settings of a run"),
    "nothing": (spoiled(""), "does not hold all settings of a run"),
    "two documents": (spoiled("seed: 1\n---\nseed: 2\n"), "cannot be read: line 2: but found another document"),
    "deep": (spoiled("[" * 20_000), "cannot be read: "),
    "a bomb": (spoiled("a: &a [x, x]\nb: &b [*a, *a]\nenvironment: {name: *b}\n"), "cannot be read: it uses aliases"),
    "not UTF-8": (lambda file: file.write_bytes(b"seed: \xff\n"), "cannot be read: 'utf-8' codec can't decode"),
    "a control character": (spoiled("seed: \x07\n"), "cannot be read: unacceptable character #x0007"),
    "an object": (spoiled("seed: !!python/object/apply:os.system [touch PWNED]\n"), "cannot be read: line 1: could"),
    "huge": (lambda file: os.truncate(file, 1 << 30), "cannot be read: config.yaml has 1073741824 bytes"),
    "a link": (behind_a_link, "cannot be read: config.yaml is a link"),
    "another environment": (
        spoiled("environment: {name: nowhere}\n"),
        "is not from this version of covey: there is no environment=nowhere",
    ),
    "an unknown setting": (
        lambda file: file.write_text(file.read_text() + "sed: 3\n"),
        "is not from this version of covey: unknown setting sed; did you mean seed?",
    ),
    "another type": (
        lambda file: file.write_text(file.read_text().replace("num_steps: 100\n", "num_steps: many\n", 1)),
        "is not from this version of covey: num_steps must be an integer, got many",
    ),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", BROKEN)
def test_broken_settings_of_a_run_are_one_line(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, line = BROKEN[how]
    run = foreign(Config())
    spoil(run / "config.yaml")
    for command in ("resume", "evaluate", "again") if how == "a bracket" else ("resume",):
        assert main(COMMANDS[command]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"covey: theirs/config.yaml {line}")
        assert printed.count("\n") == 1
        assert len(printed) < 500
    assert not Path("PWNED").exists()


@pytest.mark.parametrize(
    "text", ["[]\n", "no JSON\n", '{"changes": []}\n', '{"after_step": 1, "changes": {"seed": 3}}\n', "[" * 9999]
)
def test_broken_changes_of_a_run_are_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = foreign(Config())
    (run / "changes.jsonl").write_text(text)
    assert main(["train", "resume=theirs"]) == 2
    assert capsys.readouterr().err.startswith("covey: theirs/changes.jsonl is damaged (")


def test_a_change_of_a_setting_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = foreign(Config())
    (run / "changes.jsonl").write_text('{"after_step": 1, "changes": {"sed": {"to": 3}}}\n')
    assert main(["train", "resume=theirs"]) == 2
    assert capsys.readouterr().err == "covey: unknown setting sed; did you mean seed?\n"


def test_settings_that_name_nothing_are_fine() -> None:
    validate(Config())
    assert list(trust.named_code({"kinds": ["punctuation:no_comma"], "path": "rows.jsonl", "url": "hf://x/y"})) == []
    assert list(trust.named_code({"instruction": "Answer: yes", "stop": ["\n\n", ":"], "name": "org/model"})) == []
    Path("rows.jsonl").touch()
    of_here = {"data": {"path": "rows.jsonl"}, "model": {"name": "org/model"}, "judge": "nano-judge", "trackers": []}
    assert list(trust.find_risks({**of_here, "reference_model": "", "path": None})) == []
