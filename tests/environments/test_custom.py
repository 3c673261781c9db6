"""An environment of one's own by its name, as module:function, from the command line."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.environments.base import Environment, Split
from covey.environments.settings import ArithmeticConfig, CustomConfig, MixtureConfig
from covey.run.build import build_environment
from covey.run.evaluate import Evaluation
from covey.types import Failure, Prompt, Reward

from ..support.small import small_config

OURS = "tests.environments.test_custom"


class Letters:
    """The share of a letter in each completion."""

    def __init__(self, letter: str, num_prompts: int = 8) -> None:
        self.letter, self.num_prompts = letter, num_prompts

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split}-{i}", "letters", f"{i}:", {}) for i in range(self.num_prompts)]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(text.count(self.letter) / max(len(text), 1), {}) for text in completions]


class Unfinished(Environment):
    """Has one of the two methods."""

    def prompts(self, split: Split) -> list[Prompt]:
        return []


class Named(Letters):
    """Keeps things of its own under the names of methods, or the other way round."""

    def __init__(self, name: str) -> None:
        super().__init__("a")
        setattr(self, name, (lambda: {}) if name == "part_weights" else {})


class NamedToo(Named, Environment):
    """The same with the base class."""


no_signature = dict


def no_environment() -> Evaluation | None:
    return None


def built(factory: str, **options: object) -> object:
    return build_environment(small_config(environment=CustomConfig(factory=f"{OURS}:{factory}", options=dict(options))))


def test_options_are_the_arguments_of_the_factory() -> None:
    adapted = built("Letters", letter="a", num_prompts=3)
    assert type(adapted).__name__ == "Letters"
    assert vars(vars(adapted)["adapted"]) == {"letter": "a", "num_prompts": 3}


@pytest.mark.long
def test_a_run_trains_on_it_and_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(f"from {OURS} import Letters\n")
    words = ["environment=custom", "environment.factory=mine:Letters", "environment.options={letter: e}", "num_steps=1"]
    small = ["model.nano_hidden_size=16", "model.nano_num_layers=1", "model.nano_num_heads=2", "sampling.max_tokens=4"]
    words += [*small, "groups_per_step=2", "group_size=2", "evaluation.num_prompts=2", "output.progress=false"]
    assert main(["train", *words, "hydra.run.dir=run"]) == 0
    assert "factory: mine:Letters" in (tmp_path / "run" / "config.yaml").read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 1


@pytest.mark.parametrize(
    ("factory", "options", "reason"),
    [
        ("Letters", {}, "environment.options={} do not fit .*:Letters: missing a required argument: 'letter'"),
        ("Letters", {"letter": "a", "size": 1}, "got an unexpected keyword argument 'size'"),
        ("no_environment", {}, "must make an object with prompts and score, got NoneType"),
        ("no_signature", {}, "no_signature must make an object with prompts and score, got dict"),
        ("Nothing", {}, r"must define the function Nothing"),
        ("Unfinished", {}, "Unfinished must make an object with prompts and score, it lacks score"),
        ("Named", {"name": "metrics"}, "Named.metrics must be a method, got a dict"),
        ("Named", {"name": "part_weights"}, "Named.part_weights must be a property, got a function"),
        ("NamedToo", {"name": "gold"}, "NamedToo.gold must be a method, got a dict"),
    ],
)
def test_what_makes_no_environment_is_refused_in_one_line(
    factory: str, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        built(factory, **options)
    assert "\n" not in str(refusal.value)


class Numbered(Letters):
    """Letters whose ids are numbers: the same in both splits, or in one."""

    def __init__(self, way: str) -> None:
        super().__init__("a")
        self.way = way

    def prompts(self, split: Split) -> list[Prompt]:
        names = {"same": ["0", "0"], "none": [], "of both": ["0", "1"]}[self.way]
        return [Prompt(name if split == "train" or self.way != "same" else "x", "n", "1:", {}) for name in names]


class Strings(Letters):
    def prompts(self, split: Split) -> list[Prompt]:
        return ["1+1="]  # type: ignore[list-item]


class Wordless(Letters):
    """Letters whose prompts are no list, or hold no words."""

    def __init__(self, given: str) -> None:
        super().__init__("a")
        self.given = given

    def prompts(self, split: Split) -> list[Prompt]:
        kinds: dict[str, object] = {
            "nothing": None,
            "generator": (prompt for prompt in super().prompts(split)),
            "number": [Prompt("x", "n", 7, {})],  # type: ignore[arg-type]
            "no content": [Prompt("x", "n", ({"role": "user"},), {})],
        }
        return kinds[self.given]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("factory", "options", "reason"),
    [
        ("Numbered", {"way": "same"}, "must give each prompt an id of its own, two prompts of split train have '0'"),
        ("Numbered", {"way": "of both"}, "must give each prompt an id of its own, prompts of train and test have '0'"),
        ("Numbered", {"way": "none"}, "must give Prompts for split train, got none"),
        ("Strings", {"letter": "a"}, "must give Prompts for split train, got a str"),
        ("Wordless", {"given": "nothing"}, "must return a list of Prompts for split train, got a NoneType"),
        ("Wordless", {"given": "generator"}, "must return a list of Prompts for split train, got a generator"),
        (
            "Wordless",
            {"given": "number"},
            "must give a prompt text, or messages with role and content; 'x' of split train is 7",
        ),
        (
            "Wordless",
            {"given": "no content"},
            "must give a prompt text, or messages with role and content; 'x' of split train is ({'role': 'user'},)",
        ),
    ],
)
def test_prompts_that_cannot_be_told_apart_or_read_are_refused(
    factory: str, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        built(factory, **options)
    assert str(refusal.value) == f"environment=custom {reason}"


def test_a_part_of_a_mixture_is_looked_at_too() -> None:
    parts = {"mine": CustomConfig(factory=f"{OURS}:Numbered", options={"way": "of both"}), "sums": ArithmeticConfig()}
    with pytest.raises(ValueError, match="prompts of train and test have 'mine/0'"):
        build_environment(small_config(environment=MixtureConfig(parts=parts)))


def test_a_factory_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "environment=custom"]) == 2
    assert capsys.readouterr().err == "covey: environment=custom needs environment.factory=module:function, got none\n"
