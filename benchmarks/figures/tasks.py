"""Figures of the pages about tasks."""

from benchmarks.figures.shapes import Box, box, chain
from benchmarks.figures.svg import Drawing


def math() -> Drawing:
    boxes = (
        Box("completion", ("... \\boxed{3/4}",)),
        Box("extract", ("boxed, tagged or last",)),
        Box("normalise", ("LaTeX to a tree",)),
        Box("compare", ("numbers, then symbols,", "within environment.timeout"), "warm"),
        Box("scheme", ("reward of the verdict",), "good"),
    )
    return chain("How an answer in mathematics is judged", boxes)


def code() -> Drawing:
    boxes = (
        Box("completion", ("the last code block",)),
        Box("program", ("in a sandbox",), "warm"),
        Box("outputs", ("of each test",)),
        Box("compare", ("outside the sandbox",), "cool"),
        Box("reward", ("all tests, or a share",), "good"),
    )
    return chain(
        "How a program is judged",
        boxes,
        "expected values never enter the sandbox, so a program cannot read or forge them",
    )


def ifeval() -> Drawing:
    boxes = (
        Box("prompt", ("with 1 to 3 instructions",)),
        Box("completion", ()),
        Box("checks", ("25 kinds, pure Python",), "warm"),
        Box("verdicts", ("strict and loose",)),
        Box("reward", ("share, all, or mixed",), "good"),
    )
    return chain("How instructions are checked", boxes)


def infill() -> Drawing:
    boxes = (
        Box("the c_t s_t down", ("a text with gaps",)),
        Box("masked policy", ("fills all gaps at once",), "warm"),
        Box("the cat sat down", ("a filled text",)),
        Box("judge", ("real or filled?",), "cool"),
        Box("reward", ("the judge's probability",), "good"),
    )
    return chain("A masked policy fills gaps, a learned judge scores the text", boxes)


def machines() -> Drawing:
    boxes = (
        Box("completion", ("blocks as a tree",)),
        Box("place", ("overlap, size: score 0",)),
        Box("simulate", ("MuJoCo, 5 s of motion",), "warm"),
        Box("score", ("metres, or a throw",)),
        Box("reward", ("valid x task",), "good"),
    )
    return chain("How a machine is scored", boxes)


def turns() -> Drawing:
    """Return a conversation of two turns as one token stream with its loss mask."""
    drawing = Drawing(860, 150, "Two turns as one token stream")
    parts = (
        ("prompt", 150, False),
        ("completion", 190, True),
        ("reply of the environment", 230, False),
        ("completion", 190, True),
    )
    x = 40.0
    for text, width, is_loss in parts:
        box(drawing, (x, 28), (width - 6, 48), Box(text, (), "warm" if is_loss else "panel"))
        drawing.text(
            x + width / 2, 104, "trained" if is_loss else "context", size=13, colour="warm" if is_loss else "muted"
        )
        x += width
    drawing.text(430, 134, "loss mask: only tokens the policy sampled are trained", size=13, colour="muted")
    return drawing


def conversations() -> Drawing:
    boxes = (
        Box("prompt", ("encoded once for", "the whole group")),
        Box("turn", ("sampled, kept", "as it is"), "warm"),
        Box("episode.reply", ("a tool, a game,", "an agent, a person"), "cool"),
        Box("turn", ("keys and values", "are still there"), "warm"),
        Box("score", ("and a reward for", "each turn, if any"), "good"),
    )
    return chain(
        "An episode: turns of the policy and of the environment",
        boxes,
        "each attempt is a coroutine of its own: none waits for another's tools",
    )


def documents() -> Drawing:
    boxes = (
        Box("a document", ("its words, formulas,", "commands")),
        Box("covey translate", ("covey's words,", "what has none, and why"), "warm"),
        Box("recipe", ("the same numbers,", "or offline: NAME_nano")),
        Box("covey train", ("the same promises",), "good"),
    )
    return chain("From a document to a run", boxes)
