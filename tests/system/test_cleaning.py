"""What a model, a row or a server writes reaches no terminal, log or tracker as it is, and no secret does."""

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from covey.cli import main as main_module
from covey.cli.main import main
from covey.system.jsonl import JsonlWriter
from covey.system.text.console import CleanConsole
from covey.system.text.escaping import is_visible
from covey.system.text.masking import MASK, CleanRecords, clean, clean_handlers, mask, mask_text, secrets_in
from covey_tasks.code.environment import excerpt

from ..support.small import logging_as_it_was, words

NASTY = "\x1b]0;title\x07 \x1b[2J \x9b31m \u202e\u2066 \u2028\u2029\x85 \u200b\ufeff \U000e0041 \ud83d\x00\x7f\r\x08"
FORGED = f"{NASTY}\nWARNING: forged\ncovey: forged"
SECRET = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    with logging_as_it_was():
        yield
    sys.modules.pop("hostile", None)


def assert_clean(text: str) -> None:
    assert [c for c in text if c != "\n" and not is_visible(c)] == []
    assert [line for line in text.split("\n") if line.startswith(("WARNING: forged", "covey: forged"))] == []


ENVIRONMENT = f"""
import logging
from covey.types import RunStopped
from covey.types import Failure, Prompt, Reward

NASTY = {FORGED!r}
LOGGER = logging.getLogger("hostile" + NASTY)

class Hostile:
    def __init__(self, api_key, stop_after=10**9):
        self.api_key, self.left = api_key, stop_after

    def prompts(self, split):
        text = NASTY[3:20]
        return [Prompt(f"{{split}}-{{i}}" + NASTY, "hostile", f"{{i}}+" + text, {{NASTY: NASTY}}) for i in range(6)]

    def facts(self):
        return {{"url": f"http://me:{{self.api_key}}@host", "note": "x"}}

    async def score(self, prompt, completions):
        LOGGER.warning("prompt %s with %s: %s", prompt.id, self.api_key, NASTY)
        try:
            raise ValueError(NASTY)
        except ValueError:
            LOGGER.error("scoring", exc_info=True)
        self.left -= 1
        if self.left < 0:
            raise RunStopped(prompt.id + NASTY + self.api_key)
        return [Reward(0.25 * (sum(map(ord, text)) % 4), {{"part" + NASTY: 1.0}}) for text in completions]
"""
HOSTILE = ["environment=custom", "environment.factory=hostile:Hostile", f"environment.options={{api_key: {SECRET}}}"]


def hostile_run(*typed: str) -> list[str]:
    Path("hostile.py").write_text(ENVIRONMENT, encoding="utf-8", errors="backslashreplace")
    small = words(preflight__enabled=False)
    return ["train", *small, *HOSTILE, "output.trackers=[tensorboard]", "hydra.run.dir=run", *typed]


def texts_of(run: Path) -> dict[str, str]:
    return {
        path.name: path.read_bytes().decode()
        for path in run.rglob("*")
        if path.suffix in (".jsonl", ".log", ".json", ".yaml")
    }


@pytest.mark.parametrize("end", ["", "environment.options.stop_after=3"])
def test_what_a_run_prints_and_writes_neither_acts_nor_poses_nor_tells(
    end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(hostile_run(*([end] if end else [])))
    printed = capsys.readouterr()
    assert code == (2 if end else 0), printed.err
    assert_clean(printed.out)
    assert_clean(printed.err)
    assert "\\x1b]0;title\\x07" in printed.err
    found = texts_of(Path("run"))
    assert {
        "covey.log",
        "metrics.jsonl",
        "rollouts.jsonl",
        "config.yaml",
        "versions.json",
        "summary.json",
    } <= found.keys()
    for name, text in found.items():
        assert_clean(text)
        assert SECRET not in text, name
    assert SECRET not in printed.out
    for events in Path("run").glob("tensorboard/*"):
        assert b"\x1b]0;" not in events.read_bytes()
        assert SECRET.encode() not in events.read_bytes()
    assert MASK in found["config.yaml"]
    assert MASK in found["versions.json"]


def test_a_resume_without_its_secret_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(hostile_run()) == 0
    capsys.readouterr()
    more = ["num_steps=3", "resume_changes=[num_steps]"]
    assert main(["train", "resume=run", *more]) == 2
    assert capsys.readouterr().err == (
        "covey: environment.options was saved in run without its secret; type it again: environment.options=...\n"
    )
    assert main(["train", "resume=run", f"environment.options.api_key={SECRET}", *more]) == 0
    changes = [json.loads(line) for line in Path("run/changes.jsonl").read_text().splitlines()]
    assert [change["changes"].keys() for change in changes] == [{"num_steps"}]
    policy = "model.name=run/checkpoints/step-000003/policy"
    assert main(["evaluate", policy, "hydra.run.dir=look"]) == 2
    assert main(["evaluate", policy, f"environment.options.api_key={SECRET}", "hydra.run.dir=look"]) == 0


def test_a_program_that_trains_hears_clean_warnings_too() -> None:
    Path("hostile.py").write_text(ENVIRONMENT, encoding="utf-8", errors="backslashreplace")
    Path("program.py").write_text(
        "from covey.config.schema import Config; from covey.policy.settings import ModelConfig\n"
        "from covey.environments.settings import CustomConfig\n"
        "from covey.loop import train\n"
        f"task = CustomConfig(factory='hostile:Hostile', options={{'api_key': {SECRET!r}}})\n"
        "config = Config(environment=task, num_steps=1, groups_per_step=1, group_size=2)\n"
        "config.model = ModelConfig(nano_hidden_size=16, nano_num_layers=1, nano_num_heads=2)\n"
        "config.sampling.max_tokens, config.preflight.enabled, config.evaluation.num_prompts = 2, False, 1\n"
        "train(config, 'run')\n"
    )
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert_clean(done.stderr.decode())
    assert_clean(done.stdout.decode())
    assert SECRET.encode() not in done.stderr
    assert rb"\x1b]0;title\x07" in done.stderr


def test_a_traceback_on_the_terminal_is_clean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(config: Any, folder: Path) -> None:
        raise KeyError(FORGED) from RuntimeError(FORGED)

    monkeypatch.setitem(main_module.WORK, "train", work)
    assert main(["train", "environment=arithmetic", "hydra.run.dir=run"]) == 1
    assert_clean(capsys.readouterr().err)
    assert_clean(Path("run/covey.log").read_text())


# ------------------------------------------------------------------------------------------------ the parts


def test_a_log_record_cannot_pose_as_another() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(CleanRecords((SECRET,)))
    handler.addFilter(CleanRecords((SECRET,)))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("%s", FORGED)
    logger.warning(FORGED)
    logger.warning("one %s", "two", "three")
    logger.warning({"secret": SECRET, "text": FORGED})
    try:
        raise ValueError(FORGED + SECRET)
    except ValueError:
        logger.exception("failed")
    assert_clean(stream.getvalue())
    assert SECRET not in stream.getvalue()
    assert "\n    WARNING: forged\n    covey: forged\n" in stream.getvalue()
    assert "one %s ('two', 'three')" in stream.getvalue()


def test_handlers_of_a_program_are_cleaned_inside_and_as_they_were_afterwards() -> None:
    before = [handler.filters[:] for handler in logging.getLogger().handlers]
    with clean_handlers():
        assert all(handler.filters for handler in logging.getLogger().handlers)
    assert [handler.filters for handler in logging.getLogger().handlers] == before


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_shows_colours_of_its_own_and_control_characters_of_none(terminal: bool) -> None:
    stream = io.StringIO()
    console = CleanConsole(file=stream, force_terminal=terminal, width=200)
    table = Table("name", NASTY)
    table.add_row(NASTY, "[red]cell[/red]")
    console.print(table)
    console.print(NASTY, markup=False)
    console.print("bold", style="bold")
    plain = io.StringIO()
    Console(file=plain, force_terminal=terminal, width=200).print("bold", style="bold")
    assert plain.getvalue() in stream.getvalue()
    assert_clean(re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()))


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "\\u65e5 [red]x[/red] :smile: #_-> \\xe9"), ("latin-1", "\\u65e5 [red]x[/red] :smile: #_-> é")],
)
def test_a_console_escapes_unencodable_text_and_reads_no_markup(encoding: str, shown: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    CleanConsole(file=stream, width=200).print("日 [red]x[/red] :smile: █▁→ é", soft_wrap=True)
    stream.seek(0)
    assert stream.read() == f"{shown}\n"


def test_rows_of_a_file_hold_what_was_written_and_no_character_that_acts(tmp_path: Path) -> None:
    file = JsonlWriter(tmp_path / "rows.jsonl")
    row = {"text": NASTY.replace("\ud83d", ""), NASTY[:3]: [FORGED.replace("\ud83d", "")], "😀é": "日本 \u00a0"}
    file.write(row)
    file.write({"half": "\ud83d"})
    file.close()
    content = (tmp_path / "rows.jsonl").read_bytes().decode()
    assert_clean(content)
    assert [json.loads(line) for line in content.split("\n")[:-1]] == [row, {"half": "\ufffd"}]
    assert "😀é" in content


def test_programs_are_cut_to_some_lines() -> None:
    assert excerpt("a\n" * 30) == "a\n" * 20 + "(11 of 31 lines left out)"
    assert excerpt("a" * 3000) == "a" * 2000 + "\n(1000 of 3000 characters left out)"
    assert excerpt("a\nb") == "a\nb"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://me:pw@host:80/x", f"http://me:{MASK}@host:80/x"),
        ("https://token@host", f"https://{MASK}@host"),
        ("http://me:p@ss:w@host/", f"http://me:{MASK}@host/"),
        ("a postgres://u:p@h/db and http://h/p@th", f"a postgres://u:{MASK}@h/db and http://h/p@th"),
        ("http://h/x?api_key=abc&n=3", f"http://h/x?api_key={MASK}&n=3"),
        ("http://h/x?n=3&access_token=abc", f"http://h/x?n=3&access_token={MASK}"),
        ("hf_" + "a" * 34, MASK),
        ("sk-proj-" + "a1" * 20, MASK),
        ("org/model", "org/model"),
        ("hf://org/model@main", "hf://org/model@main"),
        ("me@example.org", "me@example.org"),
    ],
)
def test_passwords_and_tokens_are_masked_in_any_text(text: str, masked: str) -> None:
    assert mask_text(text) == masked
    assert clean(text) == masked


def test_values_that_are_named_like_secrets_are_masked_wherever_they_stand() -> None:
    settings = {
        "options": {"api_key": "a", "HF_TOKEN": "b", "db": {"password": {"main": "c"}}, "credentials": ["d"]},
        "rewards": [{"function": "my:f", "args": {"auth": "e", "client_secret": "f"}}],
        "max_tokens": 3, "eos_token": "<eos>", "answer_key": "g", "keys": ["h"], "secret": None, "token": "",
    }  # fmt: skip
    assert set(secrets_in(settings)) == {"a", "b", "c", "d", "e", "f"}
    shown = json.dumps(mask(settings))
    assert [value for value in "abcdef" if f'"{value}"' in shown] == []
    assert [value for value in ("<eos>", "g", "h", "my:f") if f'"{value}"' not in shown] == []
