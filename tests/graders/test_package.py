"""covey_graders by itself: what it imports, and its functions as TRL and verl call them."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import covey_graders
from covey_graders import Grade, extract_program, grade_countdown, grade_ifeval, grade_math

PACKAGE = Path(covey_graders.__file__).parent
THIRD_PARTY = {"langdetect", "math_verify", "latex2sympy2_extended"}
"""Imported inside of functions alone."""
BESIDE = {"covey_graders", "covey_sandbox"}


def imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_module_imports_its_own_package_and_others_only_when_called(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert imports(tree) <= BESIDE | THIRD_PARTY
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Pass()]
    assert imports(tree) <= BESIDE


def test_it_grades_where_covey_and_torch_cannot_be_imported() -> None:
    code = """
import sys
sys.modules |= dict.fromkeys(("covey", "torch", "numpy", "transformers", "yaml", "sympy", "math_verify"))
import covey_graders as g
assert g.grade_math("so \\\\boxed{1/2}", "0.5").is_right
assert g.grade_countdown("<answer>3*5+7</answer>", [3, 5, 7], 22).is_right
assert g.grade_ifeval("no comma", ["punctuation:no_comma"], [{}]).strict == (True,)
assert g.grade_ifeval("Dies ist ein Satz.", ["language:response_language"], [{"language": "de"}]).strict == (True,)
assert g.extract_program("```python\\nf = 1\\n```", "f") == "f = 1\\n"
import covey_graders.code.cases, covey_graders.code.suites
print("graded")
"""
    path = str(PACKAGE.parent)
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout == "graded\n", done.stderr


@pytest.mark.parametrize(
    ("completion", "gold", "grade"),
    [
        ("\\boxed{42}", "42", Grade(True, True)),
        ("6 * 7 = 42\n#### 42", "6 * 7 = 42\n#### 42", Grade(True, True)),
        ("The answer is 42.", "so \\boxed{42}", Grade(True, False)),
        ("\\boxed{41}", "42", Grade(False, True)),
        ("\\boxed{6*7}", "42", Grade(False, True)),
        ("<think>\\boxed{42}", "42", Grade(False, False)),
    ],
)
def test_an_answer_is_graded_by_its_value_and_its_form(completion: str, gold: str, grade: Grade) -> None:
    assert grade_math(completion, gold) == grade


def test_an_answer_that_was_cut_counts_by_its_mark_alone() -> None:
    assert grade_math("which is 42", "42").is_right
    assert not grade_math("which is 42", "42", is_cut=True).is_right
    assert grade_math("\\boxed{42}, for", "42", is_cut=True).is_right


def test_values_alone_may_be_asked_for() -> None:
    assert grade_math("\\boxed{6*7}", "42", computed=False).is_right


@pytest.mark.parametrize(
    ("completion", "rules", "grade"),
    [
        ("<answer>3*5+7</answer>", {}, Grade(True, True)),
        ("<answer>3*5+7+3</answer>", {}, Grade(False, True)),
        ("<answer>15+7</answer>", {}, Grade(False, True)),
        ("3*5+7", {}, Grade(False, False)),
        ("3*5+7", {"form": "plain"}, Grade(True, True)),
        ("3*5+7", {"form": "plain", "is_cut": True}, Grade(False, False)),
    ],
)
def test_an_expression_is_graded_by_its_value_its_numbers_and_its_form(
    completion: str, rules: dict[str, Any], grade: Grade
) -> None:
    assert grade_countdown(completion, [3, 5, 7], 22, **rules) == grade


def test_numbers_may_be_left_over_where_the_rule_says_so() -> None:
    assert not grade_countdown("<answer>3*5</answer>", [3, 5, 7], 15).is_right
    assert grade_countdown("<answer>3*5</answer>", [3, 5, 7], 15, uses="at_most").is_right


def test_instructions_are_judged_after_the_thoughts() -> None:
    verdicts = grade_ifeval("<think>a, b</think>\nSure,\nno comma", ["punctuation:no_comma"], [None])
    assert (verdicts.strict, verdicts.loose) == ((False,), (True,))


def test_the_program_is_the_block_that_defines_the_entry_point() -> None:
    assert extract_program("```python\ndef f(): pass\n```\nTry it:\n```python\nf()\n```", "f") == "def f(): pass\n"


def readme_code(name: str) -> Any:
    """Return the function of this name that the README shows."""
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(next(block for block in blocks if f"def {name}(" in block), scope)
    return scope[name]


def test_the_readmes_reward_function_takes_what_trl_passes() -> None:
    reward = readme_code("accuracy_reward")
    said = [{"role": "assistant", "content": "\\boxed{42}"}]
    columns = {"prompts": ["q"] * 3, "completion_ids": [[1]] * 3, "answer": ["42", "#### 42", "42"]}
    assert reward(completions=["\\boxed{42}", "\\boxed{41}", "none"], **columns) == [1.0, 0.1, 0.0]
    assert reward(completions=[said] * 3, **columns) == [1.0] * 3


def test_the_readmes_compute_score_takes_what_verl_passes() -> None:
    score = readme_code("compute_score")
    row = {"data_source": "openai/gsm8k", "solution_str": "#### 42", "extra_info": {"split": "train"}}
    assert score(**row, ground_truth="42") == {"score": 1.0, "has_form": 1.0}
    assert score(**row, ground_truth="41") == {"score": 0.0, "has_form": 1.0}
