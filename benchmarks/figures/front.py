"""The banner, which explains the method, and the rooms of the package."""

import tomllib
from pathlib import Path

from benchmarks.figures.shapes import Box, box
from benchmarks.figures.svg import Drawing

ROOT = Path(__file__).resolve().parents[2]

REWARDS = (0.3, 0.8, 0.15, 0.62, 0.95, 0.25, 0.1, 0.72)
"""How high the birds of the banner fly: eight answers to one prompt."""
BIRD = (
    "M{x0} {y}c14 -20 29 -21 36 -8c7 -13 22 -12 36 8c-12 -9 -23 -9 -29 -1"
    "c-2 5 -4 8 -7 10c-3 -2 -5 -5 -7 -10c-6 -8 -17 -8 -29 1z"
)
"""Wings and body in one outline, 72 wide."""

ABOUT = {
    "cli": "the command: words, help, errors, tables",
    "trl": "scripts of TRL, one import changed",
    "api": "covey as a library",
    "loop": "the one loop",
    "run": "one run: parts, checks, evaluation, checkpoints, records",
    "config": "settings of a whole run, rules between them",
    "cluster": "samplers of their own, by Ray",
    "rewards": "ready-made rewards by name",
    "rollouts": "prompts to groups",
    "engine": "sampling tokens",
    "trainer": "groups to a step",
    "environments": "what completions are worth",
    "policy": "model, attention, log-probs, kernels, shards",
    "algorithm": "rewards to advantages, log-probs to a loss",
    "system": "processes, ranks, waits, disks, text",
    "types": "the five types",
    "sandbox": "untrusted programs",
}
"""What each room of the contract is about."""
DOORS = ("loop", "types", "rewards", "sandbox", "trl")
"""Files, not folders: the loop, the types, short lists of names."""


def banner() -> Drawing:
    drawing = Drawing(1216, 300, "covey: eight answers to one prompt, compared with their mean")
    drawing.text(56, 128, "covey", size=76, anchor="start", weight=700)
    for place, line in enumerate(("GRPO post-training", "of language models", "from verifiable rewards")):
        drawing.text(60, 172 + 27 * place, line, size=20, colour="muted", anchor="start")
    low, high, left, step = 226.0, 66.0, 462.0, 82.0
    mean = low - (low - high) * sum(REWARDS) / len(REWARDS)
    drawing.line([(left - 66, mean), (left + 8 * step - 8, mean)], "muted", 2, "7 6")
    drawing.text(left + 8 * step + 4, mean - 4, "mean of", size=14, colour="muted", anchor="start")
    drawing.text(left + 8 * step + 4, mean + 14, "the group", size=14, colour="muted", anchor="start")
    for place, reward in enumerate(REWARDS):
        x, y = left + step * place, low - (low - high) * reward
        colour = "warm" if y < mean else "muted"
        drawing.line([(x, mean), (x, y + (14 if y < mean else -22))], colour, 2, "2 4")
        drawing.path(BIRD.format(x0=f"{x - 36:.1f}", y=f"{y:.1f}"), fill=colour, colour="none")
    drawing.arrow((left - 66, low + 26), (left - 66, high - 30))
    drawing.text(left - 78, high - 20, "reward", size=14, colour="muted", anchor="end")
    note = "one prompt, eight answers: advantage = reward above or below the mean"
    drawing.text(left - 66, 284, note, size=15, colour="muted", anchor="start")
    return drawing


def layers() -> list[list[str]]:
    """Return the rooms of the import contract, from the top."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (contract,) = [found for found in tools["importlinter"]["contracts"] if found["type"] == "layers"]
    return [layer.split(" | ") for layer in contract["layers"]]


def rooms() -> Drawing:
    """Return the rooms as a house of floors: imports run down."""
    floors = layers()
    height, gap, left, width = 50.0, 9.0, 56.0, 900.0
    drawing = Drawing(width + left + 32, len(floors) * (height + gap) + 60, "The rooms of covey: imports run down")
    for floor, names in enumerate(floors):
        wide = (width - gap * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            tone = "warm" if name in DOORS else "panel"
            label = f"{name}.py" if name in DOORS else f"{name}/"
            spot = (left + place * (wide + gap), 24 + floor * (height + gap))
            box(drawing, spot, (wide, height), Box(label, (ABOUT[name],), tone))
    bottom = 24 + len(floors) * (height + gap) - gap
    drawing.arrow((28, 28), (28, bottom))
    note = "A file imports from its own room and from floors below. Orange: files; the others are folders."
    drawing.text(left + width / 2, bottom + 30, note, size=13, colour="muted")
    return drawing
