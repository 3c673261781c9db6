"""What an environment would refuse to be built from, `covey config` refuses too, in one line with what there is."""

from pathlib import Path

import pytest

from covey.cli.main import main

IFEVAL = ["environment=ifeval"]
ROWS = ["data.path=rows.jsonl"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            [*IFEVAL, "environment.scheme=strikt"],
            "environment.scheme must be one of strict, strict_share, loose, loose_share, torchrl, got strikt",
        ),
        (
            [*IFEVAL, "environment.kinds=[punctuation:no_coma]"],
            "environment.kinds of style full must be among ",
        ),
        ([*IFEVAL, "environment.style=terse"], "environment.style must be one of full, short, got terse"),
        (
            ["environment=math", *ROWS, "environment.scheme=verl_math"],
            "environment.scheme must be one of covey, values, math_verify, trl, torchrl, got",
        ),
        (
            ["environment=gsm8k", *ROWS, "environment.scheme=verl"],
            "environment.scheme must be one of covey, values, verl_strict, verl_flexible, torchrl, trl, got verl",
        ),
        (
            ["environment=gsm8k", *ROWS, "environment.format_reward=1"],
            "environment.format_reward must be < 1, got 1.0",
        ),
        (["environment=countdown", "environment.uses=once"], "environment.uses must be one of exactly, at_most, got"),
        (
            ["environment=mixture", "environment.parts={asked: {name: ifeval, scheme: strikt}}"],
            "environment.parts.asked: environment.scheme must be one of strict, ",
        ),
    ],
)
def test_a_name_that_an_environment_does_not_have_is_refused_with_those_it_has(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", *words]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith(f"covey: {line}")


def test_settings_of_generated_prompts_are_not_checked_with_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", *IFEVAL, *ROWS]) == 0
    assert "scheme: strict_share" in capsys.readouterr().out
