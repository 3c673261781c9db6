"""Environments by name: covey's own, and those of installed packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from covey.api import settings as api
from covey.cli.help import verb_help
from covey.config.schema import group_choices, setting_names
from covey.environments.registry import ENVIRONMENTS, environment_class, environment_classes, known_class
from covey.environments.settings import EnvironmentConfig

MODULE = """
from dataclasses import dataclass
from covey.environments.settings import EnvironmentConfig
from covey.system.setting import setting

@dataclass
class DigitsConfig(EnvironmentConfig):
    "Digits to copy."
    name: str = "digits"
    num_digits: int = setting(3, ge=1)
    "Digits of a prompt."

    def build(self, run, say):
        raise AssertionError

@dataclass
class Misnamed(DigitsConfig):
    name: str = "numbers"

class Plain:
    pass
"""


def installed(folder: Path, distribution: str, *entries: str, module: str = MODULE) -> None:
    """An installed distribution with these entry points and one module, as pip would leave it in a folder."""
    name = distribution.replace("-", "_")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[covey.environments]\n" + "\n".join(entries) + "\n")
    (folder / f"{name}.py").write_text(module)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is searched for packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("its_digits", "other_digits", "broken_digits"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_each_of_coveys_environments_has_its_own_settings(name: str) -> None:
    assert environment_class(name).name == name


def test_an_installed_package_adds_an_environment_everywhere(folder: Path) -> None:
    installed(folder, "its-digits", "digits = its_digits:DigitsConfig")
    assert "digits" in group_choices()["environment"]
    assert "environment.num_digits" in setting_names()
    assert "environment=digits:" in verb_help("config")
    assert "Digits of a prompt. [>= 1]" in " ".join(verb_help("config").split())
    found = api.make_config(None, {"environment": "digits", "num_digits": 5}).config.environment
    assert (type(found).__name__, found.num_digits) == ("DigitsConfig", 5)


def test_an_unknown_name_is_answered_with_the_nearest_and_how_to_add_one(folder: Path) -> None:
    installed(folder, "its-digits", "digits = its_digits:DigitsConfig")
    with pytest.raises(ValueError, match=r"^environment must be one of agent, .*digits.*, got digitz; did you mean"):
        environment_class("digitz")
    with pytest.raises(ValueError, match=r"digits\?; a package may add others \(pip install PACKAGE\)$"):
        environment_class("digitz")


def test_two_packages_with_one_name_are_both_named(folder: Path) -> None:
    installed(folder, "its-digits", "digits = its_digits:DigitsConfig")
    installed(folder, "other-digits", "digits = other_digits:DigitsConfig")
    with pytest.raises(ValueError) as refusal:
        environment_class("digits")
    line = str(refusal.value)
    assert line.startswith("environment=digits is in ")
    assert line.endswith("; uninstall all of these but one")
    assert "its-digits 1.0" in line
    assert "other-digits 1.0" in line


def test_a_package_that_cannot_be_imported_is_named_and_hides_no_other(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installed(folder, "broken-digits", "digits = broken_digits:DigitsConfig", module="import no_such_module\n")
    line = (
        "environment=digits needs broken_digits:DigitsConfig of broken-digits 1.0, whose import raised "
        "ModuleNotFoundError: No module named 'no_such_module' (broken_digits.py:1)"
    )
    with pytest.raises(ValueError) as refusal:
        environment_class("digits")
    assert str(refusal.value) == line
    assert set(environment_classes()) == set(ENVIRONMENTS)
    assert caplog.messages == [f"left out: {line}"]
    assert known_class("digits") is EnvironmentConfig


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("digits = its_digits:Nothing", "environment=digits needs its_digits:Nothing of its-digits 1.0, whose import "),
        (
            "digits = its_digits:Plain",
            "environment=digits must be a dataclass that inherits EnvironmentConfig and ",
        ),
        (
            "digits = its_digits:Misnamed",
            "environment=digits must have name = \"digits\" in its settings, got 'numbers'",
        ),
    ],
)
def test_an_entry_that_is_no_environment_is_refused_in_one_line(entry: str, line: str, folder: Path) -> None:
    installed(folder, "its-digits", entry)
    with pytest.raises(ValueError) as refusal:
        environment_class("digits")
    assert str(refusal.value).startswith(line)
    assert "its-digits 1.0" in str(refusal.value)


def test_a_name_of_coveys_own_comes_before_a_packages(folder: Path) -> None:
    installed(folder, "its-digits", "gsm8k = its_digits:DigitsConfig")
    assert environment_class("gsm8k").__module__.startswith("covey")


def test_the_help_of_the_command_imports_no_environment() -> None:
    code = (
        "import sys; from covey.cli.main import main; main(['--help']);"
        "sys.exit(str([m for m in sys.modules if m.endswith('.settings') and 'environments.' in m"
        " and m not in ('covey.environments.settings', 'covey.environments.data.settings')] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
