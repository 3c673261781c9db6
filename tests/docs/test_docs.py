"""What the documentation says is true: commands compose, examples run, names, files and links exist."""

import ast
import contextlib
import importlib
import inspect
import json
import logging
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from PIL import Image
from transformers import LlamaConfig

from benchmarks.demo.arithmetic import spread
from benchmarks.real.recipes import RESULTS, front
from covey.algorithm.aggregation import AGGREGATIONS
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.credit.selection import GROUP_FILTERS, SELECTION
from covey.algorithm.credit.shaping import SHAPING
from covey.algorithm.kl import ESTIMATORS, SAMPLER_ESTIMATORS
from covey.algorithm.losses import LOSSES
from covey.cli import main as main_module
from covey.cli.help import VERBS, group_choices
from covey.cli.main import main
from covey.config import compose as settings
from covey.config.schema import Config, setting_names
from covey.rollouts.settings import CurriculumConfig
from covey.types import Prompt
from covey_preflight.custom import try_curriculum, try_custom
from covey_report import command as report
from covey_report.branch import command as branch
from covey_report.doctor import command as doctor
from covey_report.export import command as export
from covey_report.runs import command as runs
from covey_report.runs import rollouts, status
from covey_report.runs.folders import run_folder_of
from covey_report.verify import command as verify
from covey_report.verify.judge import CONFIRMED, Judgement
from covey_trl import translation as foreign

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGES = [path for path in SOURCE.glob("covey*") if (path / "__init__.py").is_file()]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *SOURCE.glob("*/README.md"),
        *(ROOT / name / "README.md" for name in ("benchmarks", "tests")),
    ]
)
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
LAUNCHED = re.compile(r"^(?:torchrun|accelerate|srun|sbatch|ray) .*?(?:examples/slurm/(\w+)\.sbatch|covey) (.*)$")
FILE_NAME = re.compile(r"^# (\S+\.(?:py|yaml))$", re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [body for found, body in FENCE.findall(TEXTS[page]) if found == language]


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", TEXTS[page])


def example_files(page: str) -> dict[str, str]:
    """Files the examples of a page consist of, by name: a block names its file in a comment, or a shell writes it."""
    files = {}
    for body in [*blocks(page, "python"), *blocks(page, "yaml")]:
        name = FILE_NAME.search(body)
        assert name, f"{page}: an example must name its file in a comment: {body[:60]}"
        files[name[1]] = body
    files.update(pair for body in blocks(page, "bash") for pair in HEREDOC.findall(body))
    return files


def command_lines(page: str) -> list[list[str]]:
    """The `covey ...` commands in the shell blocks of a page, and in its text where they are whole."""
    shell = "".join(HEREDOC.sub("", body) for body in blocks(page, "bash")).replace("\\\n", " ")
    inline = [span for span in SPAN.findall(prose(page)) if span.startswith("covey ")]
    lines = [LAUNCHED.sub(covey_command, line.strip()) for line in [*shell.splitlines(), *inline]]
    return [shlex.split(line.partition(" > ")[0], comments=True)[1:] for line in lines if line.startswith("covey ")]


def covey_command(launched: re.Match[str]) -> str:
    """The command that a launcher starts; of a script of examples/slurm/, whose GPUs are elsewhere, its settings."""
    script, rest = launched.groups()
    return f"covey config {'source=ray ' * (script == 'async')}{rest}" if script else f"covey {rest}"


EXAMPLE_MODULES = {name.removesuffix(".py") for page in TEXTS for name in example_files(page)}
FIRST_PAGES = {
    shlex.join(words): page
    for page in reversed(TEXTS)
    for words in command_lines(page)
    if not words[0].isupper() and words[0] != "best"
}
"""Each command, and the first page that shows it; `best` is the verb of the example package."""
COMMANDS = [
    pytest.param(page, shlex.split(line), marks=pytest.mark.slow if "--film" in line else [])
    for line, page in FIRST_PAGES.items()
]
ALGORITHM_SETTINGS = sorted(
    {span for span in SPAN.findall(TEXTS["docs/use/algorithms.md"]) if "algorithm" in span and "=" in span}
)
TEACHER = ["algorithm.teacher=self", "algorithm.teacher_shows=[gold]"]
"""What settings of a teacher need; options beside it say which term they are of."""
REFUSED = re.compile(r"^\| `covey ([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)
SETTINGS_PAGE = "docs/use/settings.md"
GAVE_WAY = " in place of "
"""In each line about a value that gave way to what was typed."""
OF_A_RUN = " needs a run folder"
USUAL_SETTINGS = settings.to_yaml(Config())
REFUSALS = [(shlex.split(words), line) for words, line in REFUSED.findall(TEXTS[SETTINGS_PAGE])]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples: schemas are registered anew for another."""
    return tmp_path_factory.mktemp("cache")


def make_run(folder: Path) -> None:
    """Make a run to go on with."""
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001" / "manifest.json").touch()
    (folder / "config.yaml").write_text(USUAL_SETTINGS)


@pytest.fixture
def workbench(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder with the example files of all pages; what examples leave in the process is undone."""
    for page in TEXTS:
        for name, content in example_files(page).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content, encoding="utf-8")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for folder in ("FOLDER", "outputs/DATE/TIME"):
        make_run(tmp_path / folder)
    (tmp_path / "saved.yaml").write_text(USUAL_SETTINGS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COVEY_CACHE", str(cache))
    modules = set(sys.modules)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name in EXAMPLE_MODULES:
            del sys.modules[name]
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


# ------------------------------------------------------------------------------------------------ commands


def identity(value: Any) -> str:
    return " ".join(value)[:60] if isinstance(value, list) else str(value)


@pytest.mark.long
@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=identity)
def test_every_command_is_accepted_or_refused_as_the_page_says(
    page: str, words: list[str], workbench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in main_module.WORK:
        monkeypatch.setitem(main_module.WORK, verb, lambda config, folder, *asked: None)
    for verb, module in (("status", status), ("replay", runs)):  # they find the run, which has trained nothing
        monkeypatch.setattr(module, f"run_{verb}", lambda words, verb=verb: run_folder_of(verb, words))
    monkeypatch.setattr(doctor, "run_doctor", lambda words: 0 if doctor.read_words(words) else 1)
    monkeypatch.setattr(rollouts, "run_rollouts", lambda words: 0 if rollouts.read_words(words) else 1)
    monkeypatch.setattr(export, "run_export", lambda words: 0 if export.read_words(words) else 1)
    monkeypatch.setattr(verify, "verify", lambda asked: Judgement(CONFIRMED, ""))
    monkeypatch.setattr(verify, "_again", lambda asked, summary: CONFIRMED)
    monkeypatch.setattr(branch, "run_branch", lambda words: 0 if branch.read_words(words) else 1)
    for verb in ("report", "watch"):  # there is nothing in it to show
        monkeypatch.setattr(report, f"run_{verb}", lambda words, verb=verb: report.read_words(verb, words))
    monkeypatch.setattr("covey.cli.job.check_early", lambda config, **which: [])  # files and hub models of a reader
    if words[0] in ("show", "status", "replay"):  # of runs that another command of the page begins
        for folder in ("A", "B", "outputs/first"):
            make_run(workbench / folder)
    if words[0] == "plan":
        (workbench / "FOLDER" / "config.json").write_text(LlamaConfig().to_json_string())
    refusals = [line for refused, line in REFUSALS if refused == words]
    code = main([word.replace("=/", "=") for word in words])  # nothing is written outside of this folder
    printed = capsys.readouterr()
    needing = (
        "train",
        "check",
        "cold-start",
        "audit",
        "evaluate",
        "plan",
        "translate",
        "machines",
        "branch",
        "serve",
        "export",
    )
    is_verb = len(words) == 1 and words[0] in needing
    if is_verb or (OF_A_RUN in printed.err and all(word.startswith("-") for word in words[1:])):
        assert (code, printed.err.partition(":")[0]) == (2, "covey")  # a sentence about the verb
        return
    said = "".join(line for line in printed.err.splitlines(keepends=True) if GAVE_WAY not in line)
    assert (code, said) == ((2, f"covey: {refusals[0]}\n") if refusals else (0, ""))


def test_the_pages_show_commands_of_every_verb_and_refusals() -> None:
    assert {line.split()[0] for line in FIRST_PAGES} >= set(VERBS)
    assert len(REFUSALS) >= 5


@pytest.mark.long
@pytest.mark.parametrize("span", ALGORITHM_SETTINGS)
def test_every_setting_of_the_algorithms_page_works_on_its_own(span: str) -> None:
    settings.register()
    needed = TEACHER if "teacher" in span or "reward_weight" in span else []
    needed = [*needed, "algorithm.teacher_term=divergence"] if "support: teacher" in span else needed
    with initialize_config_dir(str(settings.CONF), version_base="1.3"):
        settings.to_config(compose("config", overrides=[*needed, *shlex.split(span)]))


def test_every_setting_and_choice_that_is_named_exists() -> None:
    names, groups = set(setting_names()), group_choices()
    unknown = []
    for page in TEXTS:
        for name, value in re.findall(
            r"(?<![\w.+~])([a-z_]+(?:\.[a-z_]+)*)=([\w/]+)?", " ".join(SPAN.findall(prose(page)))
        ):
            is_choice = name in groups and (value in groups[name] or value.isupper())
            in_options = name.rpartition(".")[0] in OPTION_SETTINGS
            is_known = name in names or name in NO_SETTINGS or foreign.answer(name, value or "", {}) is not None
            if not (is_choice or in_options or is_known or name.startswith("hydra.")):
                unknown.append(f"{page}: {name}={value}")
        spans = [span for span in SPAN.findall(prose(page)) if not span.endswith((".py", ".json"))]
        dotted = [span for span in spans if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", span)]
        sections = {name.partition(".")[0] for name in names if "." in name}
        unknown += [f"{page}: {span}" for span in dotted if span.partition(".")[0] in sections and span not in names]
    assert unknown == []


OPTIONS = [name for name, value in vars(Config().algorithm).items() if isinstance(value, dict)]
OPTION_SETTINGS = {"model.chat_template_kwargs", *(f"algorithm.{name}" for name in OPTIONS)}
"""Settings whose keys the user's function or template knows."""
NO_SETTINGS = {"sed", "foo", "strict", "exit", "learning_rate", "optimizer__lr", "lr", "tokenizer", "temperature"}
NO_SETTINGS |= {"num_samples", "model__code"}
"""Mistakes that pages show, and keywords of Python's functions and covey's."""


# ------------------------------------------------------------------------------------------------ examples


OF_CHECKOUTS = {"book_policy.py", "nanochat_policy.py", "minimind_policy.py", "tinker_client.py"}
"""Examples of other projects' packages: tests/policy/models/own/test_made.py and tests/serve/client run them."""


@pytest.mark.long
def test_every_python_example_runs(workbench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {name for page in TEXTS for name in example_files(page) if name.endswith(".py")}
    for name in sorted(names - OF_CHECKOUTS):
        runpy.run_path(str(workbench / name))
    assert "[1.0, 1.0, 0.0]" in capsys.readouterr().out


@pytest.mark.long
def test_the_reward_of_the_readme_trains(workbench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = "rewards=[json_reward:fills_keys]"
    (words,) = [words for words in command_lines("README.md") if reward in words and words[0] == "train"]
    small = [
        "model=nano",
        "num_steps=4",
        "groups_per_step=4",
        "evaluation.num_samples=2",
        "evaluation.k=[1]",
        "sampling.max_tokens=4",
    ]
    assert main([*words, *small, "hydra.run.dir=run"]) == 0, capsys.readouterr().err
    assert (workbench / "run" / "summary.json").is_file()
    run_folder = {path.name for path in (workbench / "run").rglob("*")}
    table = TEXTS[SETTINGS_PAGE].partition("## The run folder")[2].partition("```")[0]
    named = {cell.rpartition("/")[2] for cell in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)}
    of_other_runs = {"cold_start.json", "judge.json", "schedule.jsonl"}
    assert named - of_other_runs <= run_folder


OWN_REWARDS = [words for words in command_lines("docs/use/rewards.md") if words[0] == "train" and "model=nano" in words]


@pytest.mark.parametrize("words", OWN_REWARDS, ids=identity)
def test_the_rewards_of_the_rewards_page_train_on_its_rows(
    words: list[str], workbench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["num_steps=2", "groups_per_step=2", "group_size=4", "sampling.max_tokens=4", "environment.num_workers=1"]
    small += ["evaluation.num_samples=1", "evaluation.k=[1]", "optimizer.warmup_steps=0"]
    assert main([*words, *small, "hydra.run.dir=run"]) == 0, capsys.readouterr().err
    assert (workbench / "run" / "checkpoints" / "step-000002").is_dir()


@pytest.mark.long
def test_the_functions_of_the_algorithms_page_pass_their_own_test_and_the_dry_run(workbench: Path) -> None:
    runpy.run_path("my_algorithm.py", run_name="__main__")
    commands = [words for words in command_lines("docs/use/algorithms.md") if "my_algorithm:" in " ".join(words)]
    tried: set[str] = set()
    settings.register()
    for _, *words in commands:
        with initialize_config_dir(str(settings.CONF), version_base="1.3"):
            config = settings.to_config(compose("config", overrides=words))
        tried |= set(try_custom(config, [Prompt("a", "sums", "1+1=", {})]))
    functions = re.findall(r"^def (\w+)", example_files("docs/use/algorithms.md")["my_algorithm.py"], re.MULTILINE)
    assert tried == {f"my_algorithm:{name}" for name in functions}


def test_the_curriculum_of_its_page_passes_the_dry_run(workbench: Path) -> None:
    made = runpy.run_path("my_order.py")["LeastSolved"]
    prompts = [Prompt(name, "sums", f"{name}=", {}) for name in "abc"]
    config = Config(curriculum=CurriculumConfig(name="my_order:LeastSolved"))
    assert try_curriculum(config, made(prompts, 0, True)) == ["my_order:LeastSolved"]


@pytest.mark.long
def test_the_environment_of_the_rewards_page_trains_and_shows_how_it_is_done(workbench: Path) -> None:
    source = (workbench / "backwards.py").read_text()
    shorter = source.replace('"num_steps": 40', '"num_steps": 1, "groups_per_step": 2').replace(
        '"num_steps": 30', '"num_steps": 1'
    )
    assert len(shorter) == len(source) + len(', "groups_per_step": 2') - 2, "the example no longer names its steps so"
    (workbench / "backwards.py").write_text(shorter)
    scope = runpy.run_path("backwards.py", run_name="__main__")
    assert (workbench / "outputs" / "backwards" / "summary.json").is_file()
    shown_how = scope["Backwards"]().demonstrations("test")
    assert [scope["score"](text, text).value for _, text in shown_how] == [1.0] * len(shown_how)
    splits = [{p.text for p in scope["Backwards"]().prompts(split)} for split in ("train", "test")]
    assert splits[0].isdisjoint(splits[1])


def test_the_python_page_trains_and_samples(workbench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (workbench / "from_python.py").read_text()
    shorter = source.replace("num_steps=20", "num_steps=1, groups_per_step=2, group_size=2")
    shorter = shorter.replace("num_steps=60", "num_steps=1, num_check_prompts=4").replace("step-000020", "step-000001")
    assert len(shorter) == len(source) + len(", groups_per_step=2, group_size=2, num_check_prompts=4") - 2, (
        "the example names its steps else"
    )
    (workbench / "from_python.py").write_text(shorter)
    before, _, after = source.partition("machine.prepare()")
    loads = "import sys\nif 'torch' in sys.modules: raise SystemExit('torch is imported too early')\n"
    assert "covey.loop import" in after
    subprocess.run([sys.executable, "-c", before + loads], check=True)
    runpy.run_path("from_python.py", run_name="__main__")
    assert (workbench / "outputs" / "from_python" / "summary.json").is_file()
    *_, pass_at_1, answers = capsys.readouterr().out.splitlines()
    assert "'low': " in pass_at_1
    assert len(ast.literal_eval(answers)) == 4


@pytest.mark.long
def test_the_lines_of_python_of_the_readme_train(workbench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (workbench / "from_readme.py").read_text()
    assert len([line for line in source.splitlines() if line]) <= 8
    assert "num_steps=16" in source, "the example no longer names it so"
    smaller = 'num_steps=1, groups_per_step=2, model="nano", max_tokens=4'
    (workbench / "from_readme.py").write_text(source.replace("num_steps=16", smaller))
    before = set((workbench / "outputs").rglob("summary.json"))
    runpy.run_path("from_readme.py", run_name="__main__")
    assert len(set((workbench / "outputs").rglob("summary.json")) - before) == 1
    printed = capsys.readouterr().out
    assert len(ast.literal_eval(printed[re.search(r" \[['\"]", printed).start() + 1 :])) == 3


def test_the_gain_on_the_front_page_is_that_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    front = " ".join(TEXTS["README.md"].split())
    assert f"{len(results['reward'])} seeds: {spread(results['reward'])}" in front
    assert f"{len(results['control'])} controls: {spread(results['control'])}" in front


def test_the_answers_of_the_front_page_are_those_of_the_results() -> None:
    assert " ".join(front(json.loads(RESULTS.read_text())).split()) in " ".join(TEXTS["README.md"].split())


def test_the_environment_of_the_rewards_page_fits_on_a_screen() -> None:
    assert len(example_files("docs/use/rewards.md")["backwards.py"].splitlines()) <= 40


# ------------------------------------------------------------------------------------------------ names and links


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page: str) -> None:
    broken = []
    for _, target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(file: Path) -> set[str]:
    """How headings are linked to: lower case, punctuation dropped, blanks as hyphens."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_film_has_a_dark_one_beside_it() -> None:
    shown = {place for text in TEXTS.values() for place in re.findall(r"[\w./-]+\.gif", text)}
    light = {place for place in shown if not place.endswith("-dark.gif") and "figures/" in place}
    assert light
    for place in light:
        page = next(text for text in TEXTS.values() if place in text)
        assert f'srcset="{place.removesuffix(".gif")}-dark.gif"><img src="{place}"' in page
        dark = ROOT / "docs" / place[place.index("figures/") :].replace(".gif", "-dark.gif")
        with Image.open(dark) as frames:
            assert frames.convert("L").getpixel((3, 3)) < 40


def test_a_link_whose_text_is_a_symbol_leads_to_the_file_that_defines_it() -> None:
    found = [
        (page, text[1:-1], target)
        for page in TEXTS
        for text, target in LINK.findall(prose(page))
        if re.match(r"`covey\w*\.", text)
    ]
    assert len(found) > 10
    for page, name, target in found:
        module, value = symbol(name)
        defined_in = inspect.getsourcefile(value if inspect.isclass(value) or inspect.isfunction(value) else module)
        assert Path(defined_in or "") == ((ROOT / page).parent / target).resolve(), name


def test_every_symbol_that_is_named_exists() -> None:
    names = {span for page in TEXTS for span in SPAN.findall(prose(page)) if re.fullmatch(r"covey\w*(\.\w+)+", span)}
    names -= {"covey.log", "covey.commands", "covey.callbacks"}  # a file, and groups of entry points
    for name in names:
        symbol(name)


def symbol(name: str) -> tuple[Any, Any]:
    """The module a dotted name begins with, and what it names."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            module = value = importlib.import_module(".".join(parts[:end]))
            for part in parts[end:]:
                value = getattr(value, part)
            return module, value
    raise AssertionError(name)


@pytest.mark.long
def test_every_file_that_is_named_exists() -> None:
    missing = []
    examples = {name for page in TEXTS for name in example_files(page)} | {"backwards.py"}
    for page in TEXTS:
        places = [ROOT, SOURCE, *PACKAGES, settings.CONF]
        if page.startswith("src/"):  # the first page of a package names files anywhere in it
            places += [path for path in (ROOT / page).parent.rglob("*") if path.is_dir()]
        for span in SPAN.findall(prose(page)):
            is_path = re.fullmatch(r"[\w./-]+(\.(py|yaml|md)|/)", span) and not re.search(r"NAME|NNN", span)
            if is_path and span not in examples and not any((place / span).exists() for place in places):
                missing.append(f"{page}: {span}")
    assert missing == []


def test_every_test_that_is_named_exists() -> None:
    """`file.py::test`, of a file in tests/guarantees or named by its path."""
    named = {pair for text in TEXTS.values() for pair in re.findall(r"`([\w/]+\.py)::(\w+)`", text)}
    assert len(named) > 20
    for file, test in named:
        places = [ROOT / file, *(ROOT / "tests" / "guarantees").rglob(file)]
        assert any(p.is_file() and f"def {test}(" in p.read_text() for p in places), f"{file}::{test}"


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for text in TEXTS.values() for name in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"test", "demo", "check", "setup"} <= named <= targets
    assert "make demo" in TEXTS["README.md"]
    assert "\nmake test\n" in TEXTS["README.md"]


def test_every_paper_is_one_the_code_names() -> None:
    formulas = (ROOT / "tests" / "golden" / "formulas").glob("*.py")  # some of them nothing runs yet
    benchmarks = (ROOT / "benchmarks").rglob("*.py")
    files = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.yaml"), *formulas, *benchmarks]
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    numbers = {number for text in TEXTS.values() for number in re.findall(r"\b\d{4}\.\d{5}\b", text)}
    assert len(numbers) > 30
    assert {number for number in numbers if number not in code} == set()


# ------------------------------------------------------------------------------------------------ completeness


def test_every_recipe_has_a_row_on_its_page() -> None:
    rows = re.findall(r"^\| `([\w/]+)` \|", TEXTS["docs/tasks/recipes.md"], re.MULTILINE)
    assert sorted(rows) == group_choices()["recipe"]


def test_every_verb_has_a_row_on_the_settings_page() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", TEXTS["docs/use/settings.md"].split("```")[0], re.MULTILINE)
    assert sorted(rows) == sorted(VERBS)


def test_every_preset_and_algorithm_function_has_a_row_on_its_page() -> None:
    page = TEXTS["docs/use/algorithms.md"]
    presets = re.findall(r"^\| `algorithm=(\w+)`", page, re.MULTILINE)
    assert sorted(presets) == group_choices()["algorithm"]
    tables = (ADVANTAGES, LOSSES, AGGREGATIONS, SHAPING, SELECTION, GROUP_FILTERS, SAMPLER_ESTIMATORS, ESTIMATORS)
    internal = {"k1_forward", "k3_forward"}
    names = {name for table in tables for name in table} - internal
    assert {name for name in names if not re.search(rf"\b{name}\b", page)} == set()


def test_the_rooms_of_the_architecture_page_are_those_of_the_contract() -> None:
    """`lint-imports` holds the code to the contract."""
    page = TEXTS["docs/develop/architecture.md"]
    rows = re.findall(r"^\| ((?:`[\w./]+` ?)+) \|", page.partition("## Rooms")[2].partition("\n## ")[0], re.MULTILINE)
    on_the_page = [{span.rstrip("/").removesuffix(".py") for span in SPAN.findall(row)} for row in rows]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (contract,) = [found for found in tools["importlinter"]["contracts"] if found["type"] == "layers"]
    assert on_the_page == [set(layer.split(" | ")) for layer in contract["layers"]]
    assert contract["exhaustive"]
    assert "ignore_imports" not in contract


def test_no_page_names_a_place_on_somebodys_machine() -> None:
    for page, text in TEXTS.items():
        assert not re.search(r"(?<![\w.~])/(?:home|root|work|tmp|Users)\b", text), page
        assert os.sep + "shared" not in text, page


def test_every_page_is_in_the_index_and_no_folder_holds_more_than_sixteen() -> None:
    index = {target for _, target in LINK.findall(TEXTS["docs/README.md"])}
    docs = ROOT / "docs"
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"} <= index
    assert max(len(list(folder.glob("*.md"))) for folder in docs.iterdir() if folder.is_dir()) <= 16


def test_every_page_of_the_documentation_ends_with_the_files_that_implement_it() -> None:
    for page in (page for page in TEXTS if page.startswith("docs/") and page != "docs/README.md"):
        ending = TEXTS[page].rstrip().rpartition("\n\n")[2]
        assert ending.startswith("Implemented in: "), page
        assert LINK.search(ending), page
