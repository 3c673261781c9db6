"""Check an answer's layout: one box, or a last line `#### N`."""

import re

from covey_graders.math.reading.normalize import closing_brace

MAX_LAST_LINE = 200
"""Characters; a longer last line is not in the requested form."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_NUMBER = r"\$?-?(?:[\d,]*\.\d+|[\d,]*\d)"
_LINE = re.compile(rf"#### ?{_NUMBER}")
_BOXED_NUMBER = re.compile(rf"\\?{_NUMBER}(?:\\?%)?(?:[ ~]*(?:\\[ ,!])*(?:\\text *\{{[^{{}}]*\}}|[A-Za-z ]{{1,40}}))?")
"""A number, with its unit where there is one."""


def has_one_box(text: str) -> bool:
    """Check for one box that holds something, and no other."""
    return text.count("\\boxed") == 1 and boxed_answer(text) is not None


def boxed_answer(solution: str) -> str | None:
    """Return the last box's content, None without one."""
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        return None
    begin = boxes[-1].end()
    if not solution.startswith("{", begin):
        return re.split(r"[\s$.,]", solution[begin:], maxsplit=1)[0] or None
    end = closing_brace(solution, begin)
    return solution[begin + 1 : end].strip() or None if end is not None else None


def states_number(text: str) -> bool:
    """Check that only the last line is `#### N`, or one box holds a number.

    The latter is what many models were taught to write, whatever they are asked.
    """
    return has_last_line(text) or (has_one_box(text) and _BOXED_NUMBER.fullmatch(boxed_answer(text) or "") is not None)


def has_last_line(text: str) -> bool:
    """Check that only the last nonblank line is `#### N`."""
    line = text.rstrip()[-MAX_LAST_LINE - 1 :].rpartition("\n")[2]
    return text.count("####") == 1 and len(line) <= MAX_LAST_LINE and _LINE.fullmatch(line) is not None
