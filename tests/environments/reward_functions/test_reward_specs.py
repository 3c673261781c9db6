"""Entries of `rewards`: what may stand there, and how what may not is answered."""

import functools
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from covey.environments.reward_functions.specs import check_reward, load_reward
from covey.rewards import REWARDS, SoftOverlong, think_format

USER_MODULE = """
    def scaled(completions, factor=1.0, **columns):
        return [factor * len(text) for text in completions]

    class Scaled:
        def __init__(self, factor, *, offset=0.0):
            self.factor, self.offset = factor, offset

        def __call__(self, completions, **columns):
            return [self.factor * len(text) + self.offset for text in completions]

    class Mute:
        pass

    number = 3
"""
NAMES = ", ".join(REWARDS)


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_specs.py").write_text(textwrap.dedent(USER_MODULE))
    (tmp_path / "my_broken.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_specs", raising=False)


def spec(function: str, **args: Any) -> dict[str, Any]:
    return {"function": function, "args": args}


@pytest.mark.parametrize("name", ["soft_overlong", "covey.rewards:soft_overlong", "covey.rewards:SoftOverlong"])
def test_a_ready_made_reward_goes_by_its_name_with_or_without_its_module(name: str) -> None:
    assert load_reward(spec(name, max_length=10, cache=4)) == SoftOverlong(10, 4)


def test_a_name_alone_is_a_mapping_without_args() -> None:
    assert load_reward("think_format") is load_reward({"function": "think_format"}) is think_format


def test_functions_get_their_args_with_every_call_and_classes_are_made_with_them() -> None:
    function = load_reward(spec("users_specs:scaled", factor=2.0))
    assert isinstance(function, functools.partial)
    assert function(completions=["abc"], answer=["x"]) == [6.0]
    made = load_reward(spec("users_specs:Scaled", factor=2.0, offset=1.0))
    assert type(made).__name__ == "Scaled"
    assert made(completions=["abc"], answer=["x"]) == [7.0]


WRONG: list[tuple[Any, str]] = [
    (
        "think_fromat",
        f"no reward function 'think_fromat'; did you mean think_format?; there is {NAMES}, and your own as ",
    ),
    ("users_specs", "no reward function 'users_specs'; write users_specs:FUNCTION; there is accuracy"),
    (":f", f"no reward function ':f'; there is {NAMES}"),
    (len, 'rewards must name functions: "builtins:len" in place of <built-in function len>'),
    (3, "rewards must hold names or mappings of function and args, got 3"),
    ({"fnction": "a:b"}, "rewards have no key 'fnction'; did you mean function?; there is function and args"),
    ({"args": {}}, "a mapping in rewards needs function: NAME, got {'args': {}}"),
    ({"function": "a:b", "args": [1]}, "args of the reward function a:b must be a mapping of names to values, got [1]"),
    (spec("think_format", tag=1), "reward function think_format has no argument 'tag'; it takes none"),
    (
        spec("soft_overlong", max_lenght=3, cache=1),
        "reward function soft_overlong has no argument 'max_lenght'; did you mean max_length?; it takes max_length,",
    ),
    ("soft_overlong", "reward function soft_overlong needs args.max_length, args.cache"),
    (spec("soft_overlong", max_length=3), "reward function soft_overlong needs args.cache"),
    (
        spec("soft_overlong", max_length=3, cache=4),
        "reward function soft_overlong: cache must be in [1, max_length=3], got 4",
    ),
    (spec("repetition", ngram="three"), "reward function repetition: "),
    (
        spec("pairwise", judge="users_specs:nobody"),
        "reward function pairwise: module users_specs must define the function nobody (users_specs:nobody)",
    ),
    (
        "covey.rewards:SoftOverlog",
        "reward function covey.rewards:SoftOverlog: module covey.rewards has no 'SoftOverlog'; did you mean SoftOverlo",
    ),
    ("my_reward:exact", "reward function my_reward:exact: cannot import my_reward: No module named 'my_reward'"),
    ("my_reward.py", "no reward function 'my_reward.py'; write my_reward:FUNCTION; there is "),
    ("./mine/my_reward.py", "no reward function './mine/my_reward.py'; write mine.my_reward:FUNCTION; there is "),
    (
        "/mine/my_reward.py",
        "no reward function '/mine/my_reward.py'; write my_reward:FUNCTION and set PYTHONPATH=/mine; there is ",
    ),
    (
        "/mine/my_reward.py:exact",
        "reward function /mine/my_reward.py:exact: cannot import /mine/my_reward.py: a module is named with dots and "
        "without .py; write my_reward:exact and set PYTHONPATH=/mine",
    ),
    ("my_reward.exact", "no reward function 'my_reward.exact'; did you mean my_reward:exact?; there is "),
    ("my_broken:f", "reward function my_broken:f: cannot import my_broken: No module named 'no_such_module'"),
    ("users_specs:scald", "reward function users_specs:scald: module users_specs has no 'scald'; did you mean scaled?"),
    ("users_specs:number", "reward function users_specs:number must be a function, got int"),
    ("users_specs:Mute", "reward function users_specs:Mute: a Mute cannot be called"),
    ("builtins:dict", "reward function builtins:dict: a dict cannot be called"),
    (
        spec("users_specs:scaled", facter=2.0),
        "reward function users_specs:scaled has no argument 'facter'; did you mean factor?; it takes factor",
    ),
    (spec("users_specs:scaled", completions=2.0), "reward function users_specs:scaled has no argument 'completions'"),
    ("users_specs:Scaled", "reward function users_specs:Scaled needs args.factor"),
]


@pytest.mark.parametrize(("entry", "message"), WRONG, ids=range(len(WRONG)))
def test_an_entry_that_leads_nowhere_says_which_part_is_wrong(entry: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        load_reward(entry)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_checking_reads_ready_made_rewards_and_leaves_your_modules_alone() -> None:
    check_reward(spec("no_such_module:f", anything=1))
    check_reward("no_such_module:f")
    with pytest.raises(ValueError, match=r"needs args\.cache"):
        check_reward(spec("covey.rewards:SoftOverlong", max_length=3))


def test_ready_made_rewards_load_without_torch() -> None:
    """Worker processes import them: a start must stay a matter of tenths of a second."""
    script = "import sys; from covey.rewards import REWARDS"
    script += "; print({'torch', 'transformers', 'sympy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"
