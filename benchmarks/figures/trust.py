"""Figures of the pages about trust."""

from benchmarks.figures.shapes import Box, box, chain
from benchmarks.figures.svg import Drawing

PROMISES = (
    ("1", "update does not depend on its layout"),
    ("2", "what was sampled is what is trained"),
    ("3", "nothing is lost"),
    ("4", "staleness has a bound"),
    ("5", "same seed, same rollouts"),
    ("6", "a reward cannot be forged"),
    ("7", "no silent hang, no silent ignore"),
    ("8", "every formula is checked"),
    ("9", "all of it runs on two CPU cores"),
)


def guarantees() -> Drawing:
    drawing = Drawing(900, 250, "Nine promises, each held by tests")
    for place, (number, text) in enumerate(PROMISES):
        x, y = 24 + 286 * (place % 3), 24 + 72 * (place // 3)
        drawing.rect(x, y, 274, 58)
        drawing.dot(x + 28, y + 29, 16, "warm-soft")
        drawing.text(x + 28, y + 34, number, size=16, weight=700, colour="warm")
        words = text.split()
        half = (len(words) + 1) // 2 if len(text) > 26 else len(words)
        lines = [" ".join(words[:half]), " ".join(words[half:])]
        for row, line in enumerate(line for line in lines if line):
            drawing.text(x + 54, y + (27 if lines[1] else 34) + 18 * row, line, size=14, anchor="start")
    return drawing


def reliability() -> Drawing:
    """Return a run that is killed after step 8 and resumed from its checkpoint of step 5."""
    drawing = Drawing(900, 230, "A killed run resumes from its newest valid checkpoint")
    left, step = 110.0, 60.0
    for row, (label, steps) in enumerate((("killed", range(1, 9)), ("resumed", range(6, 13)))):
        y = 62 + 84 * row
        drawing.text(left - 10, y + 5, label, size=14, anchor="end", weight=600)
        for number in steps:
            is_lost = row == 0 and number > 5
            drawing.dot(left + step * number, y, 14, "panel" if is_lost else "good-soft")
            drawing.text(left + step * number, y + 5, str(number), size=13, colour="muted" if is_lost else "ink")
    x = left + step * 5
    drawing.arrow((x, 84), (left + step * 6 - 8, 130), "good")
    drawing.text(x - 8, 108, "checkpoint", size=13, colour="good", anchor="end")
    drawing.text(left + step * 8 + 26, 67, "SIGKILL", size=14, colour="bad", anchor="start", weight=600)
    note = "steps 6 to 8 are done again, their rows leave the logs first; weights and metrics end bit for bit alike"
    drawing.text(450, 208, note, size=13, colour="muted")
    return drawing


def deadlines() -> Drawing:
    boxes = (
        Box("run", ("names each wait",)),
        Box("watchdog process", ("counts on the", "monotonic clock"), "warm"),
        Box("deadline", ("no progress for N s",)),
        Box("one line", ("who waited for what",)),
        Box("exit 154", ("stacks in covey.log",), "bad"),
    )
    return chain("How a hang ends", boxes)


def preflight() -> Drawing:
    boxes = (
        Box("tokenizer", ("prompts survive it",)),
        Box("gold answers", ("maximum reward",)),
        Box("log-probs", ("engine = trainer",), "warm"),
        Box("gradient", ("same in each layout",), "warm"),
        Box("memory", ("largest batch fits",)),
        Box("step 1", (), "good"),
    )
    return chain(
        "What is measured before the first step",
        boxes,
        "outside its tolerance, a check ends the run in one line with the figure and the remedy",
    )


def sandbox() -> Drawing:
    drawing = Drawing(900, 330, "Layers around a program that a model wrote")
    layers = (
        ("the run; in its own process, the judge with the expected values", "cool-soft", "cool"),
        ("namespaces: no network, its own users, processes and mounts", "panel", "line"),
        ("limits: memory, CPU, processes, files, output", "panel", "line"),
        ("Landlock and seccomp: few files, few system calls", "panel", "line"),
    )
    for depth, (text, fill, edge) in enumerate(layers):
        inset = 20 + 44 * depth
        drawing.rect(inset, 16 + 44 * depth, 900 - 2 * inset, 298 - 60 * depth, fill, edge)
        drawing.text(inset + 18, 42 + 44 * depth, text, size=14, anchor="start")
    box(drawing, (300, 206), (300, 40), Box("the program", (), "bad"))
    return drawing


def security() -> Drawing:
    drawing = Drawing(900, 220, "What is trusted, and what is not")
    sides = (
        ("trusted", "good", ("what you type", "settings of your own runs", "code of covey and its packages")),
        ("data only", "warm", ("weights, tokenizers, adapters", "rows, prompts, columns", "answers of servers")),
        ("hostile", "bad", ("completions", "programs that a model wrote", "run folders of others")),
    )
    for place, (head, tone, lines) in enumerate(sides):
        x = 24 + 290 * place
        drawing.rect(x, 24, 272, 140, f"{tone}-soft", tone)
        drawing.text(x + 136, 54, head, size=17, weight=600)
        for row, line in enumerate(lines):
            drawing.text(x + 136, 84 + 26 * row, line, size=14)
    drawing.text(
        450, 198, "nothing moves to the left without a check that a test tries to fool", size=14, colour="muted"
    )
    return drawing
