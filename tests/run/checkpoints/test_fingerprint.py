"""Whatever a prompt holds tells it from others, in every process alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.environments.base import Environment, Split
from covey.run.checkpoints.fingerprint import of_prompts, prompt_hash, run_identity
from covey.types import Failure, Prompt, Reward

ONE = Prompt("a", "sums", "1+1=", {"answer": 2, "tests": [(1, b"x"), None], "more": {"x": 1, "y": 0.5}})


class Listed(Environment):
    """Has just these prompts."""

    def __init__(self, **prompts: list[Prompt]) -> None:
        self._prompts = prompts

    def prompts(self, split: Split) -> list[Prompt]:
        return self._prompts.get(split, [])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return []


@dataclass(frozen=True)
class Rule:
    said: str


def with_columns(**columns: Any) -> Prompt:
    return replace(ONE, columns={**ONE.columns, **columns})


OTHERS = [
    replace(ONE, environment="products"),
    replace(ONE, id="b"),
    replace(ONE, text="1+2="),
    replace(ONE, text=({"role": "system", "content": "1+1="},)),
    replace(ONE, text=({"role": "user", "content": "1+1="},)),
    with_columns(answer=3),
    with_columns(tests=[(1, b"y"), None]),
    with_columns(more={"x": 1, "z": 0.5}),
    with_columns(more={"x": 1, "y": 0.25}),
    with_columns(answer=Rule("yes")),
    with_columns(answer=Rule("no")),
]


def test_a_prompt_that_differs_in_anything_is_another() -> None:
    found = of_prompts([ONE, *OTHERS])
    assert [name for name, _ in found] == ["sums", "products", *["sums"] * 10]
    assert len({digest for _, digest in found}) == 12
    assert of_prompts([with_columns(more={"y": 0.5, "x": 1})]) == found[:1]
    images = [of_prompts([with_columns(image=object())]) for _ in range(2)]
    assert images[0] == images[1] != found[:1]


def test_the_hash_of_all_prompts_is_about_each_of_either_split_and_their_order() -> None:
    b = OTHERS[1]
    made = [Listed(train=[ONE, b]), Listed(train=[b, ONE]), Listed(test=[ONE, b]), Listed(train=[ONE], test=[b])]
    made += [Listed(train=[ONE]), Listed(test=[b, ONE])]
    made += [Listed(train=[other], test=[ONE]) for other in OTHERS]
    assert len({prompt_hash(each) for each in made}) == len(made)
    assert prompt_hash(Listed(train=[ONE, b])) == prompt_hash(made[0])


def test_only_settings_that_change_no_number_leave_a_runs_identity_alone() -> None:
    usual = run_identity("ab", {"seed": 1, "sampling": {"top_p": 1.0}, "timeouts": {"step": 5}})
    beside = dict.fromkeys(("resume", "resume_changes", "trust_run", "output", "timeouts", "devices", "doctor"), "x")
    assert run_identity("ab", {"sampling": {"top_p": 1.0}, "seed": 1, **beside}) == usual
    for prompts, changed in (
        ("ac", {}),
        ("ab", {"seed": 2}),
        ("ab", {"sampling": {"top_p": 0.9}}),
        ("ab", {"more": 1}),
    ):
        assert run_identity(prompts, {"seed": 1, "sampling": {"top_p": 1.0}, **changed}) != usual
