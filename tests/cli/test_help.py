"""What the command says of itself, and how little it does before it answers."""

from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

from covey.cli.help import group_choices
from covey.cli.main import main
from covey.config import compose

from ..support import composing
from .test_main import VERBS, run_python


def test_help_names_every_verb_and_imports_nothing_heavy() -> None:
    done = run_python(
        "import sys; from covey.cli.main import main; code = main(['--help']) or main(['train', '--help']);"
        "heavy = {'torch', 'transformers', 'hydra', 'omegaconf', 'rich', 'asyncio'} & set(sys.modules);"
        "print('HEAVY', sorted(heavy)); sys.exit(code)"
    )
    assert done.returncode == 0
    assert done.stdout.endswith("HEAVY []\n")
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout


def test_help_of_a_verb_explains_settings_choices_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "group_size = 8" in shown
    assert "Completions of one prompt (G)." in shown
    assert ", ".join(group_choices()["environment"]) in " ".join(shown.split())
    assert "--config-dir FOLDER" in shown
    assert "settings of algorithm:" not in shown


def test_help_of_config_explains_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--help"]) == 0
    shown = capsys.readouterr().out
    for section in ("algorithm", "cold_start", "environment=gsm8k", "optimizer"):
        assert f"settings of {section}:" in shown
    assert "kl_coef = 0.0" in shown


def test_no_words_at_all_show_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("covey: GRPO")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "covey 0.1.0\n"


def test_settings_without_flags_are_composed_once_and_make_one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[str] = []
    compose_all, make = ConfigLoaderImpl._load_configuration_impl, compose._open_options

    def counted(loader: ConfigLoaderImpl, *args: Any, **kwargs: Any) -> DictConfig:
        composed.append("settings")
        return compose_all(loader, *args, **kwargs)

    def opened(schema: Any) -> DictConfig:
        composed.append(schema.__name__)
        return make(schema)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
    monkeypatch.setattr(compose, "_open_options", opened)
    compose._register.cache_clear()
    composing.forget()  # else an earlier test has composed it
    assert main(["train", "environment=arithmetic", "algorithm.kl_coef=-1"]) == 2
    assert composed == ["settings", "ArithmeticConfig"]
