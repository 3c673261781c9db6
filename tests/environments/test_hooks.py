"""What an environment's other methods raise: whose error it is, and what it costs the run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.environments import base
from covey.environments.base import Split, adapt, facts_of, follow, metrics_of
from covey.environments.mixture import Mixture
from covey.environments.settings import CustomConfig
from covey.loop import train
from covey.run.build import build_environment
from covey.types import Failure, Prompt, Reward, RunStopped
from covey_integrations.tools.environment import WithTools

from ..support.small import small_config, use, varied


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


@pytest.mark.parametrize("around", [lambda own: Mixture({"one": own}, {}), lambda own: WithTools(adapt(own))])
@pytest.mark.parametrize(
    ("method", "ask"),
    [("follow", lambda made: follow(made, 1, 2, 0.5)), ("metrics", metrics_of), ("facts", facts_of)],
)
def test_what_stands_before_an_environment_leaves_the_name_in_the_line_to_it(
    around: Any, method: str, ask: Any
) -> None:
    made = around(Raising(method, KeyError("boo")))
    with pytest.raises(ValueError, match=rf"^Raising.{method} raised KeyError: 'boo' \(test_hooks.py:\d+\)$"):
        ask(made)


def test_prompts_that_a_part_of_a_mixture_cannot_make_are_named_by_it() -> None:
    with pytest.raises(ValueError, match=r"^Raising.prompts raised KeyError: 'boo' \(test_hooks.py:"):
        Mixture({"one": Raising("prompts", KeyError("boo"))}, {})


def test_what_a_part_returns_that_is_no_number_is_named_by_it() -> None:
    with pytest.raises(ValueError, match=r"^Words.metrics must return numbers by name, got won='yes'$"):
        metrics_of(Mixture({"one": Words()}, {}))


def test_coveys_assertions_keep_their_traceback_and_a_users_is_one_line() -> None:
    own: dict[str, Any] = {}
    exec(compile("def fail(*given):\n    assert False, 'covey is wrong'", base.__file__, "exec"), own)
    environment = Raising("gold", ValueError())
    environment.follow = own["fail"]  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="covey is wrong"):
        follow(adapt(environment), 1, 2, 0.5)
    with pytest.raises(ValueError, match=r"^Raising.follow raised AssertionError: mine \(test_hooks.py:"):
        follow(adapt(Raising("follow", AssertionError("mine"))), 1, 2, 0.5)


class Words(Raising):
    """Logs what is no number."""

    def __init__(self) -> None:
        super().__init__("gold", ValueError())

    def metrics(self) -> Any:
        return {"won": "yes"}


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
    assert list(tmp_path.iterdir()) == []


def test_facts_with_names_that_are_numbers_do_not_break_a_checkpoint() -> None:
    assert facts_of(adapt(Odd({3: {10: "a", 9: (1, 2)}}))) == {"3": {"10": "a", "9": [1, 2]}}


@pytest.mark.long
def test_an_environment_that_ends_the_run_on_purpose_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, adapt(Raising("follow", RunStopped("solved"))))
    with pytest.raises(RunStopped, match=r"^solved$"):
        train(small_config(num_steps=1), tmp_path)


@pytest.mark.long
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
