"""What an environment's other methods raise: whose error it is, and what it costs the run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.environments.base import Split, adapt, facts_of
from covey.environments.settings import CustomConfig
from covey.run.build import build_environment
from covey.train import train
from covey.types import Failure, Prompt, Reward, RunStopped

from ..support.small import rows, small_config, use, varied


class Raising:
    """Raises in one of its methods."""

    def __init__(self, method: str, error: BaseException) -> None:
        self.error = error
        if method != "prompts":
            setattr(self, method, self.fail)
        self.has_prompts = method != "prompts"

    def prompts(self, split: Split) -> list[Prompt]:
        if not self.has_prompts:
            raise self.error
        return [Prompt(f"{split}-{index}", "raising", f"{index}+1=", {}) for index in range(4)]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(varied(prompt, text), {}) for text in completions]

    def fail(self, *given: Any) -> Any:
        raise self.error


def made(kind: type[BaseException]) -> Raising:
    raise kind("no seat")


@pytest.mark.parametrize("method", ["prompts", "difficulty", "gold", "metrics", "follow", "facts"])
@pytest.mark.parametrize("error", [ValueError("boo"), KeyError("boo"), SystemExit("boo")], ids=repr)
def test_what_a_method_raises_ends_the_run_in_one_line_that_names_it(
    method: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curriculum = method if method == "difficulty" else "none"
    use(monkeypatch, adapt(Raising(method, error)))
    with pytest.raises(ValueError) as refusal:
        train(small_config(num_steps=1, curriculum__name=curriculum), tmp_path)
    told = f"Raising.{method} raised {type(error).__name__}: {error} (test_hooks.py:"
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)


class Odd(Raising):
    """Records what no file can hold."""

    def __init__(self, found: object) -> None:
        super().__init__("gold", ValueError())
        self.found = found

    def facts(self) -> object:
        return self.found


@pytest.mark.parametrize(
    ("found", "got"), [({"n": 1, "rules": {1}}, "rules={1}"), ({"at": Path("x")}, "at=PosixPath('x')"), (3, "a int")]
)
def test_facts_that_no_file_can_hold_are_refused_before_the_run(
    found: object, got: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, adapt(Odd(found)))
    with pytest.raises(ValueError) as refusal:
        train(small_config(preflight__enabled=False), tmp_path)
    assert str(refusal.value) == f"Odd.facts must return plain values by name, got {got}"
    assert not (tmp_path / "checkpoints").exists()
    assert not rows(tmp_path / "metrics.jsonl")


def test_facts_with_names_that_are_numbers_do_not_break_a_checkpoint() -> None:
    assert facts_of(adapt(Odd({3: {10: "a", 9: (1, 2)}}))) == {"3": {"10": "a", "9": [1, 2]}}


def test_an_environment_that_ends_the_run_on_purpose_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, adapt(Raising("follow", RunStopped("solved"))))
    with pytest.raises(RunStopped, match=r"^solved$"):
        train(small_config(num_steps=1), tmp_path)


def test_an_environment_that_does_not_close_costs_a_warning_and_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, adapt(Raising("close", ValueError("boo"))))
    train(small_config(num_steps=1), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    assert "Raising.close raised ValueError: boo (test_hooks.py:" in caplog.text


@pytest.mark.parametrize("kind", [ValueError, KeyError, SystemExit])
def test_a_factory_that_raises_is_refused_by_its_name(kind: type[BaseException]) -> None:
    factory = f"{__name__}:made"
    told = f"^environment.factory={factory} raised {kind.__name__}: .*no seat.* "
    with pytest.raises(ValueError, match=told):
        build_environment(small_config(environment=CustomConfig(factory=factory, options={"kind": kind})))
