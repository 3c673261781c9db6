"""The budget of lines and the word linter see what they are there for, and nothing else."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.checks import lines, words

GOOD = '''
"""Sample completions."""
class Sampler:
    """Sample completions of a policy."""
    greedy = False
    """Takes the likeliest token. What if several are? The first of them."""
    @property
    def tokens_used(self): ...
    @property
    def closed(self): ...
    def feed(self): ...
    def is_closed(self):
        """Return True once the engine is gone."""
'''


def rules(source: str) -> list[str]:
    return [rule for rule, _ in words.check_module("a.py", ast.parse(source), defaultdict(list))]


def test_plain_english_is_no_finding() -> None:
    assert rules(GOOD) == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def settled(x): ...", "participle"),
        ("class A:\n    async def _asked(self): ...", "participle"),
        ('def f():\n    """Return what is kept."""', "relative"),
        ('def f():\n    """Tell whether it is kept."""', "relative"),
        ('LIMIT = 3\n"""What is kept at most."""', "free relative"),
        ('class A:\n    rate: float\n    """Of each step, in Hz."""', "free relative"),
        ('def f():\n    """Keep rows. What is left is dropped."""', "free relative"),
        ('HOST = "a"\n"""Where the server is."""', "free relative"),
        ('MODE = "a"\n"""How rows are read"""', "free relative"),
        ('SECONDS = 3.0\n"""For the server to answer."""', "free relative"),
        (f'"""{"word " * 13}"""', "long"),
        ('def f():\n    """Stop.\n\n    Nobody waits for it.\n    """', "dialect"),
        ('raise ValueError(f"got {x}, and whoever gave it must go on")', "dialect"),
    ],
)
def test_each_rule_sees_what_breaks_it(source: str, rule: str) -> None:
    assert set(rules(source)) == {rule}


def test_the_second_owner_of_a_public_class_name_is_named() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for path in ("a.py", "b.py"):
        list(words.check_module(path, ast.parse("class Answer: ...\nclass _Part: ..."), owners))
    assert list(words.check_owners(owners)) == [("namesake", "b.py:1 Answer (also a.py:1)")]


def test_pages_and_names_of_tests_are_read(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("Good.\nNobody knows.\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "def test_nobody_waits() -> None: ...\ndef test_no_wait() -> None: ...\n"
    )
    assert list(words.check_pages(tmp_path)) == [("dialect of docs", "docs/a.md:2 Nobody")]
    assert list(words.check_tests(tmp_path)) == [("dialect of tests", "tests/test_a.py:1 test_nobody_waits")]


def test_a_count_above_its_limit_fails_and_one_below_is_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("def asked(): ...\n")
    counts = tmp_path / "words.toml"
    monkeypatch.setattr("sys.argv", ["words"])
    counts.write_text("participle = 0  # why\n")
    assert words.main(tmp_path, counts) == 1
    assert "must be <= 0" in capsys.readouterr().out
    counts.write_text("participle = 3  # why\n")
    assert words.main(tmp_path, counts) == 0
    assert "lower it" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["words", "--lower"])
    assert words.main(tmp_path, counts) == 0
    assert counts.read_text() == "participle = 1  # why\n"


def test_the_budget_counts_every_package_and_fails_above_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("core/a.py", "1\n2\n"),
        ("core/b/c.py", "1\n"),
        ("graders/d.py", "1\n"),
        ("graders/e.yaml", "1\n"),
    ):
        file = tmp_path / "src" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    budget = tmp_path / "lines.toml"
    for limits, code in (("all = 4\ncore = 3", 0), ("all = 3", 1), ("core = 2", 1)):
        budget.write_text(f"[budget]\n{limits}\n[target]\n")
        assert lines.main(tmp_path / "src", budget) == code
    assert "lines of core must be <= 2, got 3" in capsys.readouterr().out
