"""Problems that are made up: what they ask, what their programs do, and that no split has another's."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from covey_sandbox.types import CallTest
from covey_tasks.code.families import CLASSICS, FAMILIES, chosen_families
from covey_tasks.code.problems import NUM_TESTS, Problem, drawn, generate_problems, reference, with_tests
from covey_tasks.code.words import hint, signature_of

ALL = [(family, level) for family, levels in FAMILIES.items() for level in levels]
COUNTS: Any = {"train": 30, "test": 10}


def everything(problem: str, difficulty: int | None = None, seed: int = 0, counts: Any = COUNTS) -> list[Problem]:
    return [found for split in generate_problems(problem, difficulty, counts, seed).values() for found in split]


@pytest.mark.parametrize(("family", "level"), ALL)
def test_splits_share_no_problem_and_a_program_passes_its_own_tests(family: str, level: int) -> None:
    splits = generate_problems(family, level, COUNTS, 0)
    statements = [problem.statement for split in splits.values() for problem in split]
    num_train = 1 if (family, level) in CLASSICS else 30
    assert len(set(statements)) == len(statements) == num_train + 10
    assert (len(splits["train"]), len(splits["test"])) == (num_train, 10)
    for problem in (*splits["train"], *splits["test"]):
        scope: dict[str, Any] = {}
        exec(problem.solution or "", scope)
        assert len(problem.tests) == NUM_TESTS
        for test in (*problem.tests, *problem.fresh_tests("again")):
            assert scope[problem.entry_point](*test.args) == test.expected  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(3))
def test_fizzbuzz_at_difficulty_3_is_the_one_that_everybody_knows(seed: int) -> None:
    splits = generate_problems("fizzbuzz", 3, COUNTS, seed)
    (known,) = splits["train"]
    program = reference(drawn("fizzbuzz", 3, known.drawn_from or ""))
    assert [program(n) for n in (1, 3, 5, 9, 15, 98)] == ["1", "Fizz", "Buzz", "Fizz", "FizzBuzz", "98"]
    assert all(test.expected == program(*test.args) for test in known.fresh_tests("again"))  # type: ignore[union-attr]
    assert "`def fizzbuzz(n: int) -> str`" in known.statement
    assert known.statement not in [problem.statement for problem in splits["test"]]


@pytest.mark.parametrize(
    "forgetful",
    [
        '"Fizz" * (n % 3 == 0) + "Buzz" * (n % 5 == 0)',
        '"Fizz" * (n % 3 == 0) or str(n)',
        '"Buzz" * (n % 5 == 0) or str(n)',
        '"Fizz" if n % 3 == 0 else "Buzz" if n % 5 == 0 else str(n)',
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_five_tests_of_fizzbuzz_see_which_kind_of_number_is_forgotten(forgetful: str, seed: int) -> None:
    (known,) = generate_problems("fizzbuzz", 3, COUNTS, seed, num_tests=5)["train"]
    assert any(eval(forgetful, {"n": test.args[0]}) != test.expected for test in known.tests)  # type: ignore[union-attr]


@pytest.mark.parametrize(("family", "level"), ALL)
def test_a_full_problem_states_its_signature_and_two_untested_examples(family: str, level: int) -> None:
    for problem in everything(family, level):
        draft = drawn(family, level, problem.drawn_from or "")
        lines = problem.statement.partition("For example:\n")[2].split("\n\n")[0].split("\n")
        shown = [line.removeprefix(f"{draft.entry_point}(").split(") returns ") for line in lines]
        assert len(shown) == len({answer for _, answer in shown}) == 2
        for given, answer in shown:
            arguments = eval(f"({given},)")
            assert repr(reference(draft)(*arguments)) == answer
            assert arguments not in [test.args for test in problem.tests]  # type: ignore[union-attr]
        signature = problem.statement.partition("signature is `")[2].partition("`")[0]
        assert signature.startswith(f"def {draft.entry_point}(")
        assert signature.partition(" -> ")[2]
        assert problem.statement.endswith("```python block.")


def test_in_short_a_problem_is_its_statement_alone_and_the_same_problem() -> None:
    short = generate_problems("all", None, COUNTS, 0, style="short")["train"]
    full = generate_problems("all", None, COUNTS, 0)["train"]
    assert [(p.tests, p.solution, p.drawn_from) for p in short] == [(p.tests, p.solution, p.drawn_from) for p in full]
    assert all(p.statement == drawn(p.family, p.difficulty or 0, p.drawn_from or "").statement for p in short)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1], "int"),
        ([True, False], "bool"),
        ([[1], ["a", 2]], "list[int | str]"),
        ([[[1, 2]], []], "list[list[int]]"),
        ([[], []], "list"),
        ([None, 1.5], "None | float"),
        ([], ""),
    ],
    ids=str,
)
def test_a_type_is_told_by_all_values(values: list[Any], told: str) -> None:
    assert hint(values) == told


def test_a_signature_keeps_what_the_program_says_and_fills_in_what_calls_tell() -> None:
    calls = [CallTest((1, "a"), expected=[1])]
    assert (
        signature_of("def f(a, b: str = '') -> list[float]: ...", "f", calls)
        == "def f(a: int, b: str='') -> list[float]"
    )
    assert signature_of("def f(a): ...\ndef g(b): ...", "g") == "def g(b)"
    assert [signature_of(program, "f") for program in ("f = 3", "def f(:", None)] == [None] * 3


@pytest.mark.parametrize(("family", "level"), ALL)
def test_a_trivial_program_passes_at_most_half_of_any_problems_tests(family: str, level: int) -> None:
    counts: Any = {"train": 300, "test": 100}
    for problem in everything(family, level, counts=counts):
        for tests in (problem.tests, problem.fresh_tests("again")):
            answers = [shown(test.expected) for test in tests]  # type: ignore[union-attr]
            assert max(map(answers.count, answers)) <= 5, problem.statement
            for program in IDLE:
                passed = sum(answer_of(program, test.args) == shown(test.expected) for test in tests)  # type: ignore[union-attr]
                assert passed <= 5, problem.statement
            assert len({repr(test.args) for test in tests}) == NUM_TESTS  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(3))
def test_joining_everything_is_no_way_to_join_what_is_near(seed: int) -> None:
    def join_all(pairs: list[list[int]]) -> list[list[int]]:
        return [[min(a for a, _ in pairs), max(b for _, b in pairs)]]

    for problem in everything("intervals", seed=seed, counts={"train": 100, "test": 20}):
        tests = problem.tests
        assert any(answer_of(join_all, test.args) != shown(test.expected) for test in tests)  # type: ignore[union-attr]


IDLE: tuple[Callable[..., Any], ...] = (
    *(lambda *given: given[0], lambda *given: given[-1], lambda *given: str(given[0]), lambda *given: given),
    *(lambda *given: list(given[0]), lambda *given: sorted(given[0]), lambda *given: -given[0]),
)
"""What is given, or the same under another name."""


def answer_of(program: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    try:
        return shown(program(*arguments))
    except Exception as error:
        return f"raised {error}"


def shown(value: Any) -> str:
    """Return text that tells 1, 1.0 and True apart, as the judge does."""
    return repr(value)


def test_fresh_tests_ask_about_other_inputs_and_are_the_same_every_time() -> None:
    problem = everything("parentheses", 7)[0]
    assert problem.fresh_tests("a") == problem.fresh_tests("a")
    assert problem.fresh_tests("a") != problem.tests
    assert problem.fresh_tests("a") != problem.fresh_tests("b")


def test_a_problem_without_an_origin_has_no_other_tests() -> None:
    problem = everything("line")[0]
    own = Problem("rows", None, "?", "f", problem.tests)
    assert own.fresh_tests("a") == problem.tests


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_a_constant_passes_at_most_half_of_the_drawn_tests(count: int) -> None:
    for problem in generate_problems("all", None, COUNTS, 0, count)["train"]:
        answers = [shown(test.expected) for test in problem.tests]  # type: ignore[union-attr]
        assert len(answers) == len(problem.fresh_tests("again")) == count
        assert max(map(answers.count, answers)) <= (count + 1) // 2


def test_more_tests_than_a_family_has_calls_are_refused_with_the_setting() -> None:
    with pytest.raises(
        ValueError, match=r"environment.tests_per_problem=200 is too many for .Python: .*, which has [0-9]+"
    ):
        generate_problems("fizzbuzz", 3, COUNTS, 0, 200)


def test_a_rows_tests_are_drawn_by_seed_in_order_beside_any_rows() -> None:
    first, second = (Problem("rows", None, name, "f", everything("line")[0].tests) for name in ("a", "b"))
    both: Any = with_tests({"train": [first, second]}, 4, seed=0)["train"]
    (alone,) = with_tests({"train": [second]}, 4, seed=0)["train"]
    assert both[1] == alone != with_tests({"train": [second]}, 4, seed=1)["train"][0]
    assert both[0].tests != both[1].tests
    places = [first.tests.index(test) for test in both[0].tests]
    assert len(places) == 4
    assert places == sorted(set(places))
    assert with_tests({"train": [first]}, 11, seed=0)["train"] == [first]
    assert with_tests({"train": [first]}, None, seed=0)["train"] == [first]


def test_problems_are_a_function_of_the_seed_and_travel_between_processes() -> None:
    assert everything("all") == everything("all")
    assert everything("starters", seed=1) != everything("starters", seed=2)
    assert pickle.loads(pickle.dumps(everything("all"))) == everything("all")


def test_families_take_equal_parts_and_a_small_one_gives_each_split_its_share() -> None:
    drawn_problems = generate_problems("all", 8, {"train": 400, "test": 100}, 0)
    train = [problem.family for problem in drawn_problems["train"]]
    test = [problem.family for problem in drawn_problems["test"]]
    assert set(train) == set(test) == {"parentheses", "intervals"}
    assert train.count("intervals") < 200
    assert 3 <= train.count("intervals") / test.count("intervals") <= 4


@pytest.mark.parametrize(
    ("problem", "difficulty", "found"),
    [
        ("starters", None, [("line", 1), ("steps", 2)]),
        ("fizzbuzz", None, [("fizzbuzz", 3), ("fizzbuzz", 4)]),
        ("parentheses", 7, [("parentheses", 7)]),
        ("all", 4, [("fizzbuzz", 4), ("counting", 4)]),
    ],
)
def test_a_setting_names_families_and_difficulties(
    problem: str, difficulty: int | None, found: list[tuple[str, int]]
) -> None:
    assert chosen_families(problem, difficulty) == found


def test_what_there_is_not_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"problem must be one of starters, all, line, steps, .*, got brackets"):
        chosen_families("brackets", None)
    line = r"difficulty=3 needs a problem that has it, got problem=parentheses \(7, 8\)"
    with pytest.raises(ValueError, match=line):
        chosen_families("parentheses", 3)
    with pytest.raises(ValueError, match="num_train and num_test must be >= 1, got 0 and 10"):
        generate_problems("line", None, {"train": 0, "test": 10}, 0)


def solve(family: str, level: int, wanted: str, *arguments: Any) -> Any:
    """What the program of the first problem whose statement says `wanted` answers."""
    drafts = (drawn(family, level, str(seed)) for seed in range(100_000))
    return reference(next(draft for draft in drafts if wanted in draft.statement))(*arguments)


@pytest.mark.long
def test_the_programs_do_what_their_statements_say() -> None:
    """Worked out by hand."""
    assert solve("line", 1, "returns n minus 15", 5) == -10
    assert solve("steps", 2, "n times 6, then plus 46", 3) == 64
    assert solve("steps", 2, "n plus 4, then times 6", 3) == 42
    assert solve("steps", 2, "n minus 40, then times 2", 3) == -74
    words = '"Fizz" for multiples of 3, "Buzz" for multiples of 5, joined'
    assert [solve("fizzbuzz", 3, words, n) for n in (1, 3, 10, 15)] == ["1", "Fizz", "Buzz", "FizzBuzz"]
    assert solve("counting", 4, "multiples of 3 and above 10", [3, 9, 12, 13, 15, 30]) == 3
    assert solve("counting", 4, "multiples of 3 and below 10", [3, 9, 10, 0, 12]) == 3
    assert solve("letters", 5, "letter 1 places", "Xz.") in ("Xa.", "Xz.")
    assert solve("digits", 6, "of the digits of n in base 10, once", 345) in (12, 50, 216)


def test_bracket_programs_tell_matching_from_crossed_and_open_ones() -> None:
    yes = "returns True where every bracket of the kinds () [] is"
    answers = [solve("parentheses", 7, yes, text) for text in ("", "([a])", "([)]", "(", ")", "())", "<(>)")]
    assert answers == [True, True, False, False, False, False, True]
    depth = "kinds () [] are nested, or -1 where"
    assert [solve("parentheses", 8, depth, text) for text in ("", "()", "([])[]", "(]", "((")] == [0, 1, 2, -1, -1]


def test_the_hardest_programs_are_right_on_small_cases() -> None:
    assert solve("intervals", 8, "at most 2 between", [[8, 9], [1, 3], [5, 6]]) == [[1, 9]]
    assert solve("intervals", 8, "at most 0 between", [[8, 9], [1, 3], [3, 6]]) == [[1, 6], [8, 9]]
    draft = next(
        d for d in (drawn("postfix", 9, str(seed)) for seed in range(10_000)) if '"+" gives a - b' in d.statement
    )
    assert reference(draft)([7, 2, "+"]) == 5
    assert (
        solve("edits", 10, "inserting a character costs 1, deleting one 1 and replacing one 1", "kitten", "sitting")
        == 3
    )
    assert solve("edits", 10, "inserting a character costs 2, deleting one 3 and replacing one 9", "a", "b") == 5


def test_inputs_of_brackets_are_right_about_half_of_the_time() -> None:
    tests = [test for problem in everything("parentheses", 7) for test in problem.tests]
    share = sum(test.expected in (True, 1, "yes") for test in tests) / len(tests)  # type: ignore[union-attr]
    assert 0.35 <= share <= 0.65
