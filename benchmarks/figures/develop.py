"""Figures of the pages about development."""

from benchmarks.figures.shapes import Box, box, chain
from benchmarks.figures.svg import Drawing


def architecture() -> Drawing:
    boxes = (
        Box("Prompt", ("a row of the data",)),
        Box("Completion", ("tokens, log-probs",)),
        Box("Rollout", ("with its reward",)),
        Box("Group", ("all of one prompt",), "warm"),
        Box("Batch", ("packed tensors",)),
        Box("new version", ("published",), "good"),
    )
    return chain(
        "The chain of data: five types",
        boxes,
        "sampled by engine/, scored by environments/, credited and trained by trainer/",
    )


def glossary() -> Drawing:
    """Return one group with its parts named."""
    drawing = Drawing(900, 290, "The parts of a group")
    box(drawing, (24, 96), (150, 84), Box("prompt", ("27 + 45 =",)))
    rows = (("72", 1.0, 0.5), ("71", 0.0, -0.5), ("72", 1.0, 0.5), ("612", 0.0, -0.5))
    for place, (text, reward, advantage) in enumerate(rows):
        y = 46 + 50 * place
        tone = "warm" if advantage > 0 else "panel"
        drawing.arrow((178, 138), (264, y + 19))
        box(drawing, (270, y), (170, 38), Box(text, (), tone))
        drawing.text(520, y + 25, f"{reward:g}", size=16)
        drawing.text(640, y + 25, f"{advantage:+.1f}", size=16, colour="warm" if advantage > 0 else "muted", weight=600)
        drawing.line([(690, y + 19), (714, y + 19)], "line")
    for x, label in ((355, "completions"), (520, "reward"), (640, "advantage")):
        drawing.text(x, 32, label, size=14, colour="muted")
    drawing.line([(714, 65), (714, 215)], "line")
    drawing.text(728, 136, "a group of 4", size=15, anchor="start", weight=600)
    drawing.text(728, 158, "mean reward 0.5", size=13, anchor="start", colour="muted")
    drawing.text(
        450,
        272,
        "a rollout is a prompt, one completion and its reward, as tokens with a loss mask",
        size=13,
        colour="muted",
    )
    return drawing
