"""Graders: a completion's text in, a verdict out; imports no torch.

>>> grade_math("3 + 4 = 7, so \\\\boxed{7}.", "7").is_right
True
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from covey_graders.grade import Grade

if TYPE_CHECKING:
    from covey_graders.ifeval.instructions import Verdicts

__all__ = ["Grade", "extract_program", "grade_countdown", "grade_ifeval", "grade_math"]


def grade_math(completion: str, gold: str, question: str = "", *, computed: bool = True, is_cut: bool = False) -> Grade:
    """Grade the answer of a completion to a mathematical question.

    Args:
        gold: the reference answer in LaTeX or plain text, or a solution that ends in `#### N` or holds a box.
        question: says whether a form is asked for, such as "in base 7".
        computed: an answer that leaves the computation undone (`2^{10}` for 1024) is wrong; else values alone count.
        is_cut: the completion ran out of tokens before its end; without a mark it then gives no answer.
    """
    from covey_graders.math.judge import compare
    from covey_graders.math.layout import boxed_answer, has_last_line, has_one_box
    from covey_graders.tags import visible

    reference = gold.rpartition("####")[2].strip() if "####" in gold else boxed_answer(gold) or gold
    said = visible(completion)
    is_right = compare(completion, reference, question, computed, is_cut)
    return Grade(is_right, has_one_box(said) or has_last_line(said))


def grade_countdown(completion: str, numbers: Sequence[int], target: int, **rules: Any) -> Grade:
    """Grade an expression of the numbers for the target, in answer tags.

    `rules` are `uses`, `form` and `is_cut` of `covey_graders.countdown.grade`.
    """
    from covey_graders.countdown import grade

    return grade(completion, numbers, target, **rules)


def grade_ifeval(
    completion: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]
) -> "Verdicts":
    """Grade a completion, without thoughts, by a row of IFEval.

    Returns strict and loose verdicts on each instruction, with their means. ValueError for an unknown instruction, or
    arguments that it does not take, lacks or cannot mean.
    """
    from covey_graders.ifeval.instructions import verdicts
    from covey_graders.tags import after_thoughts

    return verdicts(after_thoughts(completion), instruction_id_list, kwargs)


def extract_program(completion: str, entry_point: str = "", opening: str = "") -> str:
    """Extract the submitted program of a completion, "" without one.

    Args:
        entry_point: the function or class that is asked for; "" for a script.
        opening: the beginning of the program that the problem gives, which a completion may go on from.
    """
    from covey_graders.code import extract

    return extract.extract_program(completion, entry_point, opening)
