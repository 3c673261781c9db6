"""Anybody's installed package adds verbs and callbacks; covey asks for them only where it knows no such name."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.cli.verbs import OWN
from covey.config.early import check_early
from covey.config.schema import Config
from covey.run.records.callbacks import Callbacks, make_callbacks
from covey.system.extensions import Extensions
from covey.system.lookup import resolve

from ..support.small import rows
from .test_main import run_python

MODULE = '''
"""A package of somebody else."""
from pathlib import Path
import covey

print("imported")

def greet(words):
    """Greet whoever is named.

    More about it."""
    print("hello", *words)
    return 7

class Counts(covey.Callback):
    def __init__(self, config, say):
        self.most, self.say = config.num_steps, say

    def on_step(self, step, metrics):
        metrics["pack/left"] = float(self.most - step)
        self.say(f"pack: {self.most - step} to go")
'''
POINTS = """
[covey.commands]
greet = greeting_pack.verbs:greet
train = greeting_pack.verbs:greet

[covey.callbacks]
counts = greeting_pack.verbs:Counts
"""


def install(folder: Path, name: str, points: str) -> None:
    """Lay out a distribution as an installer leaves it."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    (folder / name / "verbs.py").write_text(MODULE)
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(points)


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path, "greeting_pack", POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "greeting_pack"]:
        del sys.modules[name]


def test_an_installed_verb_runs_with_its_words_and_returns_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "you", "and=me"]) == 7
    assert capsys.readouterr().out == "imported\nhello you and=me\n"


def test_help_names_an_installed_verb_without_importing_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "\n  greet        Greet whoever is named.\n" in shown
    assert "imported" not in shown
    assert main(["greet", "--help"]) == 0
    assert capsys.readouterr().out.endswith("usage: covey greet ...\n\nGreet whoever is named.\n\nMore about it.\n")


def test_an_unknown_verb_is_compared_with_installed_ones_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gret"]) == 2
    assert 'no verb "gret"; did you mean greet?' in capsys.readouterr().err


def test_no_package_takes_a_verb_of_covey_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "usage: covey train [setting=value ...]" in capsys.readouterr().out


def test_two_packages_with_one_verb_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path, "other_pack", POINTS.replace("greeting", "other"))
    assert main(["greet"]) == 2
    line = capsys.readouterr().err
    assert "verb=greet is in greeting_pack 1.0, other_pack 1.0; uninstall all of these but one" in line


def test_covey_scans_no_packages_for_verbs_of_its_own() -> None:
    done = run_python(
        "from covey.cli.main import main; from covey.system import extensions; main(['doctor', '--help']);"
        "print('SCANNED', extensions._read_group.cache_info().misses)"
    )
    assert done.stdout.endswith("SCANNED 0\n")


@pytest.mark.parametrize("verb", OWN)
def test_what_runs_a_verb_is_there(verb: str) -> None:
    assert callable(resolve(OWN[verb], {}))


def test_a_callback_is_called_that_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    config = Config()
    config.output.callbacks = ["counts", "greeting_pack.verbs:Counts"]
    config.doctor.enabled = False
    made = make_callbacks(config, said.append)
    metrics: dict[str, float | None] = {}
    Callbacks(made).step(3, metrics)
    assert metrics == {"pack/left": config.num_steps - 3.0}
    assert said == [f"pack: {config.num_steps - 3} to go"] * 2


@pytest.mark.long
def test_a_run_has_the_numbers_of_an_installed_callback(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["recipe=arithmetic", "num_steps=2", "cold_start.enabled=false", "preflight.enabled=false"]
    small = ["groups_per_step=2", "group_size=2", "evaluation.num_prompts=2", "sampling.max_tokens=4"]
    assert main(["train", *words, *small, "output.callbacks=[counts]", f"hydra.run.dir={folder}"]) == 0
    steps = [row for row in rows(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["pack/left"] for row in steps] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nobody", r"output.callbacks must be one of counts, got nobody; a package may add others"),
        ("greeting_pack.verbs:Count", "module greeting_pack.verbs must define the function Count"),
    ],
)
def test_a_callback_that_is_not_there_is_refused_before_the_run(name: str, line: str) -> None:
    config = Config()
    config.output.callbacks = [name]
    with pytest.raises(ValueError, match=line):
        check_early(config, loads_model=False)


def test_a_name_is_refused_where_no_package_adds_any() -> None:
    with pytest.raises(
        ValueError, match=r"things must be one of the names of covey\.things \(no installed package adds"
    ):
        Extensions("covey.things", "things", {}).load("one")


def test_a_package_that_is_broken_has_no_line_of_help(tmp_path: Path) -> None:
    (tmp_path / "greeting_pack" / "verbs.py").write_text("def greet(:")
    assert Extensions("covey.commands", "verb", {}).first_line("greet") == ""
    assert Extensions("covey.commands", "verb", {}).first_line("nobody") == ""
