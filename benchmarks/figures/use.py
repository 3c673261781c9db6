"""Figures of the pages about use: settings, rewards, Python, results, algorithms, curriculum, several processes."""

from benchmarks.figures.shapes import Box, Plot, axes, box, chain
from benchmarks.figures.svg import Drawing


def settings() -> Drawing:
    boxes = (
        Box("defaults", ("beside each field",)),
        Box("groups", ("model, environment,", "algorithm preset")),
        Box("recipe", ("a named run",)),
        Box("typed", ("key=value",), "warm"),
        Box("checks", ("ranges, packages,", "rules between settings")),
        Box("run folder", ("config.yaml",), "good"),
    )
    return chain(
        "Settings: later ones override",
        boxes,
        "later settings override earlier ones; a setting nothing reads is refused",
    )


def rewards() -> Drawing:
    drawing = Drawing(900, 200, "A reward function runs in a worker process with a deadline")
    box(drawing, (24, 60), (180, 70), Box("completions", ("of one prompt",)))
    box(drawing, (300, 50), (230, 90), Box("your function", ("in a worker process,", "environment.timeout"), "warm"))
    box(drawing, (630, 24), (246, 64), Box("Reward", ("a number, and its parts",), "good"))
    box(drawing, (630, 112), (246, 64), Box("Failure", ("counted, never a reward of 0",), "bad"))
    drawing.arrow((208, 95), (294, 95))
    drawing.arrow((534, 80), (624, 58), "good")
    drawing.arrow((534, 110), (624, 142), "bad")
    drawing.text(415, 172, "hangs, crashes, raises: the worker is replaced", size=13, colour="muted")
    return drawing


def python() -> Drawing:
    boxes = (
        Box("model, rewards, data", ("names or objects",)),
        Box("covey.train", ("checks, then the one loop",), "warm"),
        Box("Result", ("before, after, metrics",)),
        Box("sample, evaluate", ("on what was trained",)),
        Box("save", ("for transformers",), "good"),
    )
    return chain("covey as a library", boxes)


def trl() -> Drawing:
    boxes = (
        Box("your script", ("one import changed",)),
        Box("GRPOConfig", ("every field mapped,", "or refused by name")),
        Box("GRPOTrainer", ("covey's loop,", "TRL's gradient"), "warm"),
        Box("log_history", ("TRL's names",)),
        Box("save_model", ("a folder as TRL's",), "good"),
    )
    return chain("A script of TRL", boxes)


def traces() -> Drawing:
    boxes = (
        Box("groups of a step", ("as they were trained",)),
        Box("a few of them", ("failures, spread, mismatch,", "change of ratio, evenly"), "warm"),
        Box("traces.jsonl", ("each token: log-probs,", "ratio, entropy, advantage")),
        Box("covey report", ("tokens in colour",), "good"),
    )
    return chain("What is traced of a step", boxes)


def plan() -> Drawing:
    boxes = (
        Box("config.json", ("the model's shape,", "no weights")),
        Box("settings", ("as for covey train",)),
        Box("data sheets, prices", ("with their date",)),
        Box("covey plan", ("memory, seconds,", "hours, dollars"), "warm"),
        Box("the run", ("planned and taken",), "good"),
    )
    return chain("A plan of a run", boxes, "--probe trains four steps here first, and corrects what is planned")


def using_results() -> Drawing:
    drawing = Drawing(900, 210, "What to do with a checkpoint")
    box(drawing, (24, 68), (220, 74), Box("checkpoint", ("safetensors, tokenizer,", "chat template"), "warm"))
    uses = (
        Box("from_pretrained", ("transformers, peft, vLLM",)),
        Box("merge adapters", ("one plain model",)),
        Box("train again", ("model.name=FOLDER",)),
    )
    for place, use in enumerate(uses):
        y = 16 + 62 * place
        box(drawing, (420, y), (340, 54), use)
        drawing.arrow((248, 105), (414, y + 27))
    return drawing


def algorithms() -> Drawing:
    boxes = (
        Box("rewards", ("of one group",)),
        Box("shaping", ("length, overlong",)),
        Box("advantage", ("minus baseline, scale",), "warm"),
        Box("importance ratio", ("token or sequence",)),
        Box("loss", ("clip, KL, entropy",), "warm"),
        Box("aggregate", ("/ global counts",)),
        Box("gradient", (), "good"),
    )
    return chain(
        "From rewards to a gradient", boxes, "each box is a table of pure functions, chosen by name in algorithm.*", 28
    )


def curriculum() -> Drawing:
    """Return the window of success rates: p (1 - p), the variance of a right-or-wrong reward."""
    drawing = Drawing(760, 310, "A curriculum prefers prompts inside a window of success rates")
    plot = Plot(70, 56, 640, 180, (0, 1), (0, 0.28))
    low, high = plot.x(0.3), plot.x(0.5)
    drawing.rect(low, plot.top, high - low, plot.height, "warm-soft", "none")
    axes(drawing, plot, {0: "0", 0.3: "0.3", 0.5: "0.5", 1: "1"}, {0: "0", 0.25: "0.25"})
    drawing.line(plot.points([(step / 50, step / 50 * (1 - step / 50)) for step in range(51)]), "warm", 3)
    drawing.text(plot.x(0.4), plot.top + 76, "curriculum", size=14, weight=600)
    drawing.text(plot.x(0.4), plot.top + 94, ".window", size=14, weight=600)
    drawing.text(plot.x(0.12), plot.top + 14, "too hard", size=14, colour="muted")
    drawing.text(plot.x(0.88), plot.top + 14, "solved", size=14, colour="muted")
    drawing.text(plot.x(0.5), 284, "success rate p of a prompt", size=14, colour="muted")
    drawing.text(70, 34, "variance of its rewards, p (1 - p)", size=14, colour="muted", anchor="start")
    return drawing


def distributed() -> Drawing:
    drawing = Drawing(900, 270, "Two ranks train on their shares of the groups; counts are global")
    for rank in range(2):
        y = 28 + 112 * rank
        box(drawing, (24, y), (130, 76), Box(f"rank {rank}", ("one process",)))
        box(drawing, (190, y), (170, 76), Box("its groups", ("sampled, scored",)))
        box(drawing, (396, y), (180, 76), Box("its gradient", ("of micro-batches",)))
        for start, end in ((158, 186), (364, 392)):
            drawing.arrow((start, y + 38), (end, y + 38))
        drawing.arrow((580, y + 38), (634, 122 if rank == 0 else 146), "warm")
    box(drawing, (640, 84), (236, 100), Box("sum over ranks", ("divided by global counts", "of loss tokens"), "warm"))
    drawing.text(450, 252, "the same update as one process: a group is never split over ranks", size=14, colour="muted")
    return drawing


def scale() -> Drawing:
    drawing = Drawing(900, 250, "Groups in the order of admission, a bound of 1, four groups a step")
    rows = (
        (5, "trained now, on version 5"),
        (6, "trained next, on version 6"),
        (7, "not admitted: version 6 is not live"),
    )
    for place, (step, line) in enumerate(rows):
        x = 24 + 290 * place
        tone = ("good", "warm", "panel")[place]
        box(drawing, (x, 30), (270, 70), Box(f"step {step}", (line,), tone))  # type: ignore[arg-type]
        for number in range(4):
            colour = "line" if place == 2 else tone
            drawing.dot(x + 60 + 50 * number, 130, 14, colour)
    drawing.text(169, 175, "started on version 4 or 5", size=13, colour="muted")
    drawing.text(459, 175, "started on version 5", size=13, colour="muted")
    drawing.text(749, 175, "the window is full", size=13, colour="muted")
    drawing.text(450, 225, "(max_staleness + 1) x groups_per_step may be admitted", size=14, colour="muted")
    return drawing
