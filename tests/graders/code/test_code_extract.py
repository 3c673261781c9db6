"""Which program a completion hands in."""

import json
import time
from pathlib import Path

import pytest

from covey_graders.code.extract import MAX_COMPLETION, defines, extract_program, fenced_blocks

F = "def f(n):\n    return n\n"
USE = "print(f(3))\n"
G = "def f(n):\n    return 2 * n\n"


def fence(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}```\n"


@pytest.mark.parametrize("language", ["python", "py", "Python", "", "python   ", "{.python}"])
def test_a_fenced_block_of_any_language_is_the_program(language: str) -> None:
    assert extract_program(f"Sure!\n{fence(F, language)}\nThat is it.", "f") == F


def test_the_last_block_that_defines_the_function_is_the_program() -> None:
    assert extract_program(f"First try:\n{fence(F)}\nBetter:\n{fence(G)}", "f") == G
    assert extract_program(f"{fence(G)}\nTry it:\n{fence(USE)}", "f") == G
    assert extract_program(fence("f = len\n") + fence("def g(): pass\n"), "f") == "f = len\n"


def test_the_block_that_defines_the_class_is_the_program_where_a_method_is_tested() -> None:
    solution = "class Solution:\n    def twice(self, n): return 2 * n\n"
    use = fence("print(Solution().twice(4))\n")
    assert extract_program(f"{fence(solution)}\nTry it:\n{use}", "Solution.twice") == solution


def test_where_no_block_defines_it_the_last_one_counts() -> None:
    assert extract_program(fence("x = 1\n") + fence("y = 2\n"), "f") == "y = 2\n"


def test_thoughts_hand_nothing_in() -> None:
    assert extract_program(f"<think>\n{fence(F)}</think>\n\n{fence(G)}", "f") == G
    assert extract_program(f"<think>\n{fence(F)}", "f") == ""
    assert extract_program(f"<think>{fence(F)}</think>", "f") == ""
    assert extract_program(f"\n<think>so</think>{F}", "f").lstrip("\n") == F


def test_what_prose_would_hide_is_code_in_a_program() -> None:
    program = 'def f(x):\n    page = "<!-- not closed"\n    return ~~x + ~~len(page)\n'
    assert extract_program(fence(program), "f") == program


def test_a_fence_that_is_never_closed_ends_with_the_text() -> None:
    assert extract_program(f"Here:\n```python\n{F}", "f") == F


def test_a_fence_is_closed_by_one_of_its_own_kind_and_no_shorter() -> None:
    inside = 'def f(n):\n    """\n```\n"""\n'
    assert fenced_blocks(f"````\n{inside}````\n") == [inside]
    assert fenced_blocks(f"~~~\n{inside}~~~\n") == [inside]


def test_an_indented_block_loses_the_indentation_of_its_fence() -> None:
    indented = "".join(f"   {line}\n" for line in ("```python", "def f(n):", "    return n", "```"))
    assert extract_program(f"1. So:\n{indented}", "f") == F


@pytest.mark.parametrize("before", ["Sure: ", "<answer>", "**Answer** ", "1. "])
def test_a_block_may_begin_behind_other_text(before: str) -> None:
    assert extract_program(f"{before}{fence(F)}That is it.", "f") == F
    assert extract_program(f"{before}```python\n{F}", "f") == F


def test_a_block_may_stand_in_an_answer_tag_without_further_lines() -> None:
    assert extract_program(f"{fence(F)[:-1]}<|im_end|>", "f") == F
    for language in ("python", ""):
        assert extract_program(f"<answer>{fence(F, language)[:-1]}</answer>\nDone.", "f") == F


def test_marks_in_words_and_in_code_are_no_fences() -> None:
    assert extract_program(f"Not in ```, but as code:\n{fence(F)}", "f") == F
    assert extract_program(f"Write ```f``` so, not in ```\n{fence(F)}", "f") == F
    quoted = 'def f(n):\n    return "```"\n'
    assert extract_program(fence(quoted), "f") == quoted


def test_a_fence_may_close_at_the_end_of_the_last_line_of_code() -> None:
    assert extract_program(f"```python\n{F[:-1]}```\nHope that helps.", "f") == F[:-1]
    assert extract_program(f"```python\n{F[:-1]}```", "f") == F[:-1]
    assert extract_program(f"```python\n{F[:-1]}```</answer>\nDone.", "f") == F[:-1]
    assert extract_program(f"First:\n```python\n{F[:-1]}```\nTry it:\n{fence(USE)}", "f") == F[:-1]
    assert extract_program(f"```python\n{F[:-1]}```\nBetter:\n{fence(G)}", "f") == G


def test_only_a_fence_on_its_own_line_closes_a_block() -> None:
    code = 'def f(n):\n    """Write code as ```\n    so.\n    """\n    return n\n'
    assert extract_program(f"{fence(code)}That is it.", "f") == code
    assert extract_program(f"````python\n{code}", "f") == code


@pytest.mark.parametrize(("marks", "language"), [("```", "markdown"), ("```", "md"), ("````", "Markdown")])
def test_a_block_in_a_block_of_markdown_is_the_program(marks: str, language: str) -> None:
    wrapped = f"{marks}{language}\n# Answer\n{fence(F)}{marks}\n"
    assert extract_program(wrapped, "f") == F
    assert extract_program(f"Here:\n{wrapped}Hope that helps.", "f") == F
    assert fenced_blocks(f"{wrapped}So:\n{fence(G)}") == [F, G]
    assert fenced_blocks(f"{marks}{language}\n{fence(F)}or\n{fence(G)}{marks}\nBye.") == [F, G]


def test_a_block_of_markdown_without_another_one_in_it_is_a_program_like_any() -> None:
    assert extract_program(f"{fence(F, 'markdown')}Bye.", "f") == F
    assert extract_program(f"```markdown\n{fence(F)}", "f") == F
    rest = "    return 2 * n\n"
    assert extract_program(f"```markdown\n{fence(rest)}```\n", "f", OPENING) == OPENING + rest


@pytest.mark.parametrize("mark", ["> ", ">", "> > ", "  > "])
def test_a_block_may_be_quoted(mark: str) -> None:
    code = "def f(n):\n    m = n\n\n    return m > 2\n"
    quoted = "".join(f"{mark}{line}".rstrip() + "\n" for line in f"Sure:\n{fence(code)}".splitlines())
    assert extract_program(f"{quoted}Bye.", "f") == code
    assert extract_program(quoted.replace("python", ""), "f") == code


def test_what_looks_quoted_in_a_block_that_is_not_stays() -> None:
    code = 'def f(n):\n    """\n>>> f(3)\n> 3\n"""\n    return n\n'
    assert extract_program(f"{fence(code)}Bye.", "f") == code


def test_text_without_a_fence_may_be_in_tags_of_python() -> None:
    assert extract_program(f"Sure.\n[PYTHON]\n{F}[/PYTHON]\n[TESTS]\nassert f(1) == 1\n[/TESTS]", "f") == f"\n{F}"
    assert extract_program(f" [PYTHON]\n{F}", "f") == f"\n{F}"
    assert extract_program(f"Here it is: [PYTHON]\n{F}[/PYTHON] Bye.", "f") == f"\n{F}"
    assert extract_program(f"[PYTHON]\n{F}[/PYTHON]\nBetter:\n[PYTHON]\n{G}[/PYTHON]", "f") == f"\n{G}"
    assert extract_program(f"<answer>[PYTHON]\n{F}[/PYTHON]</answer> done", "f") == f"\n{F}"
    assert extract_program(f"[PYTHON]\n{fence(F)}[/PYTHON]", "f") == F
    named = "PYTHON = 0\ndef f(n):\n    return [PYTHON] + n[PYTHON]\n"
    assert extract_program(named, "f") == named


def test_lines_may_end_as_on_windows() -> None:
    assert extract_program(fence(F).replace("\n", "\r\n"), "f") == F


def test_text_without_a_fence_is_the_program() -> None:
    assert extract_program(F, "f") == F
    assert extract_program(f"<answer>{F}</answer> done", "f") == F
    assert extract_program(f"<answer>{F}</answer> no, <answer>{G}</answer>", "f") == G
    assert extract_program("", "f") == ""
    assert extract_program(" \n", "f") == ""


@pytest.mark.parametrize("quotes", ['"""', "'''"])
@pytest.mark.parametrize("inner", ["```", "```python", "~~~"])
def test_a_fence_in_a_docstring_ends_nothing(quotes: str, inner: str) -> None:
    program = (
        f"def f(n):\n    {quotes}Twice n.\n\n    {inner}\n    f(1)\n    {inner[:3]}\n    {quotes}\n    return 2 * n\n"
    )
    assert extract_program(fence(program) + "\nDone.", "f") == program
    flush = program.replace("    ```", "```")
    assert extract_program(fence(flush) + "\n```\nf(1)\n```\n", "f") == flush


def test_quotes_that_nothing_closes_hide_no_fence() -> None:
    program = 'def f(n):\n    return 2 * n  # not """\n'
    assert extract_program(fence(program) + "\nDone.", "f") == program
    assert extract_program(fence("x = '''\n") + fence(G), "f") == G


def test_a_byte_order_mark_is_no_part_of_a_program() -> None:
    assert extract_program("\ufeff" + G, "f") == G
    assert extract_program(fence("\ufeff" + G), "f") == G


@pytest.mark.parametrize(
    "text",
    [
        *("[BEGIN]\n{}[DONE]\n", "Code:\n[BEGIN]\n{}", "<code>\n{}</code>", "It is\n  <code>{}</code> all."),
        *("[CODE]\n{}[/CODE]", "<python>\n{}</python>\nSo it is.", "<solution>{}"),
    ],
)
def test_text_without_a_fence_may_be_between_other_marks(text: str) -> None:
    assert extract_program(text.format(G), "f").strip() == G.strip()


@pytest.mark.parametrize("before", ["", "Sure!\n\nHere is the function:\n\n", "The code is\n"])
@pytest.mark.parametrize(
    "after", ["", "\nThis function doubles its argument.\n", "\nExplanation: it\nI hope, it helps.\nf(1)"]
)
def test_sentences_round_a_program_are_no_part_of_it(before: str, after: str) -> None:
    program = "import math\nLIMIT = 3\n\nclass A:\n    x = 1\n\ndef f(n):\n    return n\n\n"
    program += "if LIMIT:\n    f(1)\nelse:\n    f(2)\n"
    assert extract_program(before + program + after, "f").strip("\n").startswith(program.strip("\n"))
    assert "argument" not in extract_program(before + program + after, "f")
    assert not extract_program(before + program + after, "f").startswith(("Sure", "The"))


def test_what_stands_before_a_program_and_is_no_sentence_stays() -> None:
    quoted = G + '"""\nThese are words of it.\n"""\n'
    assert extract_program(quoted, "f") == quoted
    for head in ("LIMIT = 3\n", "x = 4\n", "# a comment.\n", '"""Words of a module."""\n'):
        assert extract_program(head + G, "f") == head + G


def test_of_a_script_the_last_block_that_prints_is_the_program() -> None:
    script = "print(sum(map(int, input().split())))\n"
    assert extract_program(fence(script) + "For the example it gives\n```\n3\n```\n", "") == script
    assert (
        extract_program(fence("def g(n):\n    return n\n") + fence("print(g(1))\n"), "")
        == "def g(n):\n    return n\nprint(g(1))\n"
    )


def test_blocks_that_give_names_belong_to_the_one_that_uses_them() -> None:
    imports, helper, usage = (
        "import math\nfrom typing import List\n",
        "LIMIT = 3\ndef half(n):\n    return n / 2\n",
        "print(f(3))\n",
    )
    program = "def f(n: List) -> int:\n    return math.sqrt(half(n))\n"
    assert extract_program(fence(imports) + fence(program), "f") == imports + program
    assert (
        extract_program(fence(imports) + fence(helper) + fence(program) + fence(usage), "f")
        == imports + helper + program
    )
    # What is given already, is not used, or does more is left out
    assert extract_program(fence(imports) + fence(G), "f") == G
    assert extract_program(fence("import math\n" + usage) + fence(program), "f") == program
    assert extract_program(fence(program) + fence(imports + program), "f") == imports + program


def test_extraction_is_linear_in_blocks_and_quotes() -> None:
    began = time.monotonic()
    for text in ("```\n" * 49_000, "```\n'''\n" * 24_000, "```py\ndef g(): h\n```\n" * 8_000, '"""\n```\n' * 24_000):
        extract_program(text, "f")
    assert time.monotonic() - began < 10.0


def test_a_text_of_megabytes_hands_nothing_in() -> None:
    assert extract_program("#" * MAX_COMPLETION, "f") != ""
    assert extract_program("#" * (MAX_COMPLETION + 1), "f") == ""


OPENING = 'import math\n\ndef f(n):\n    """Twice n."""\n'


def test_the_rest_of_a_program_follows_its_beginning() -> None:
    assert extract_program("    return 2 * n\n", "f", OPENING) == OPENING + "    return 2 * n\n"
    assert extract_program(fence("    return 2 * n\n"), "f", OPENING) == OPENING + "    return 2 * n\n"
    assert extract_program("return 2 * n\n", "f", OPENING) == OPENING + "    return 2 * n\n"


def test_a_whole_program_follows_what_was_given_before_the_function_alone() -> None:
    assert extract_program(fence(G), "f", OPENING) == "import math\n\n" + G
    helper = "\ndef twice(n): return 2 * n\n"
    assert extract_program(G, "f", f"{helper}@twice\n@twice\ndef f(n):\n") == helper[1:] + G
    assert extract_program(G, "f", "\n\ndef f(n):\n") == G
    future = "from __future__ import annotations\n" + G
    assert extract_program(future, "f", OPENING) == future
    assert extract_program("", "f", OPENING) == ""


@pytest.mark.parametrize("text", ["def f(n): pass", "async def f(): pass", "class f: pass", "f = len", "f: int = 3"])
def test_a_name_is_defined_at_the_top_level(text: str) -> None:
    assert defines(f"import os\n{text}\n", "f")


@pytest.mark.parametrize(
    "text", ["    def f(n): pass", "def ff(n): pass", "f == 3", "print(f)", "# def f(n)", "f(x)=1"]
)
def test_what_only_looks_like_a_definition_is_none(text: str) -> None:
    assert not defines(text, "f")


@pytest.mark.shared
def test_every_right_program_of_the_shared_completions_is_found_whole(shared: Path) -> None:
    rows = [json.loads(line) for line in (shared / "data/code/completions.jsonl").read_text().splitlines()]
    problems: dict[str, dict[str, str]] = {}
    for name in ("humaneval", "mbpp_sanitized"):
        for line in (shared / f"data/code/{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            problems[row["task_id"]] = row
    found = 0
    for row in rows:
        problem = problems[row["task_id"]]
        program = extract_program(row["completion"], problem["entry_point"])
        if row["expected"] == 1.0:
            assert problem["canonical_solution"].replace("\r\n", "\n").strip()[-40:] in program, row["id"]
            found += 1
    assert found == 30


@pytest.mark.parametrize(
    "after",
    [
        "",
        "\n\nThis code subtracts 64.",
        "\n\nIt is the same as:\n\n```python\ndef f(n):\n    return n - 64\n```",
        "\n\nFor example:\n```\nprint(f(65))\n```\nprints 1.",
    ],
)
def test_a_text_that_begins_with_the_program_has_left_out_the_first_fence(after: str) -> None:
    program = extract_program(f"def f(n):\n    return n - 64\n```{after}", "f")
    assert program == "def f(n):\n    return n - 64\n"


def test_words_before_the_first_marks_begin_no_program() -> None:
    text = "Define f.\n```\ndef f(n):\n    return n\n```\n"
    assert extract_program(text, "f") == "def f(n):\n    return n\n"


@pytest.mark.parametrize("after", ["``` That is it.", "```}", "```# end", "``` </answer>", "```Done\nIt works."])
def test_marks_at_the_beginning_of_a_line_close_a_block_before_any_text(after: str) -> None:
    assert extract_program(f"```python\n{F}{after}", "f") == F
    assert extract_program(f"```python\n{F}{after}\n{fence(G)}", "f") == G
    assert extract_program(f"```python\n{F}{fence(G)}", "f") == G


def test_a_helper_may_stand_in_a_block_behind_the_program() -> None:
    helper = "def h(n):\n    return n\n"
    program = "def f(n):\n    return h(n)\n"
    assert extract_program(f"{fence(program)}where\n{fence(helper)}Try:\n{fence('import os')}", "f") == helper + program


@pytest.mark.parametrize(
    "before", ["Sure! Here it is:\n\n", "**Solution**\n\n", "1. Define it.\n2. Return it: done!\n", "> It's so:\n"]
)
@pytest.mark.parametrize(
    "after",
    [
        "- It doubles n.\n- Done",
        "**Explanation**",
        "This works because f(3) is 6 (twice 3).",
        "</s>",
        "<|im_end|>",
        "---\nx",
    ],
)
def test_words_around_a_program_without_a_fence_are_no_part_of_it(before: str, after: str) -> None:
    assert extract_program(f"{before}{G}\n{after}", "f").strip() == G.strip()


@pytest.mark.parametrize(
    "rest", ["CACHE = {}\n", "@memo\ndef h(n):\n    return n\n", "x: int = 3\n", "-f(3)\n", "f (2)\n"]
)
def test_code_behind_a_program_without_a_fence_stays(rest: str) -> None:
    assert extract_program(G + rest, "f") == G + rest
