"""summary.json as tables in the terminal."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from covey.algorithm.intervals import FEW_PROMPTS
from covey.run.folder import CONFIG, METRICS, UNTIMED
from covey.run.records.terminal import GAP
from covey.system.jsonl import read_rows
from covey.system.text.escaping import escape
from covey.system.text.format import duration, memory, number_of, percent, relative
from covey_report.runs.outcome import MEASURES, WORDS, is_number, measure_of, outcome_of, prompts_in_words

Form = Callable[[float], str]


def print_summary(content: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Print the tables, file locations, and last `run folder: ...`."""
    console.print(render(content, folder))
    print_folder(folder, console)


def print_folder(folder: Path, console: Console) -> None:
    """Print `run folder: outputs/...` on one line, relative if possible."""
    console.print(f"run folder: {relative(folder)}", soft_wrap=True)


def render(content: Mapping[str, Any], folder: Path) -> Group:
    """Build the tables: before and after, phases, totals, and files in `folder`."""
    parts: list[RenderableType] = []
    looks = [look for look in (content["before"], content["after"]) if look]
    if any(is_number(look["reward_mean"]["value"]) for look in looks):
        parts += _add_title(_evaluation_title(content), before_after(content))
    parts += _add_title(f"{duration(content['seconds'])} in all", phase_table(content))
    parts += [Text(f"\n{line}") for line in teacher_lines(folder)]
    return Group(*parts, Text(""), totals(content), *doctor_lines(content, folder), files(folder))


def teacher_lines(folder: Path) -> list[str]:
    """Describe the distance of policy and teacher, first and last."""
    gaps = [row[GAP] for row in read_rows(folder / METRICS) if is_number(row.get(GAP))]
    return [f"{GAP} {gaps[0]:.4g} at the first step, {gaps[-1]:.4g} at the last"] if gaps else []


def doctor_lines(content: Mapping[str, Any], folder: Path) -> list[Text]:
    """Return the doctor's findings, causes only, and why a run failed."""
    if not (content["steps"] or content["status"] == "failed") or not (folder / CONFIG).is_file():
        return []
    from covey_report.doctor.health import lines_below_tables

    return [Text("\n".join(lines_below_tables(folder)))]


def _add_title(title: str, table: Table) -> list[RenderableType]:
    return [Text(""), Text(title, "italic"), table]


def before_after(content: Mapping[str, Any]) -> Table:
    """Build a row per measure: before, after and paired gain. A single evaluation has one column."""
    table = _table()
    table.add_column("")
    looks, gain = [side for side in (content["before"], content["after"]) if side], content["gain"] or {}
    sides = content.get("sides", ("before", "after"))
    for heading in (*sides, "gain" if sides[0] == "before" else "difference") if len(looks) == 2 else ("measured",):
        table.add_column(heading, justify="right")
    tells = measure_of(*looks) == "accuracy"
    if tells:
        table.add_row(MEASURES["accuracy"], *_row(looks, gain, "accuracy", _percent))
    for k in [k for k in looks[-1]["pass_at_k"] if tells and all(k in look["pass_at_k"] for look in looks)]:
        of_looks = [{**look, k: look["pass_at_k"][k]} for look in looks]
        table.add_row(f"pass@{k}, %", *_row(of_looks, gain.get("pass_at_k", {}), k, _percent))
    table.add_row(MEASURES["reward_mean"], *_row(looks, gain, "reward_mean", _number))
    for name, shown in _list_monitors(content["environment"] or {}).items():
        of_looks = [{**look, name: look["reward_parts"][name]} for look in looks]
        table.add_row(shown, *_row(of_looks, gain.get("reward_parts", {}), name, _number))
    for name in looks[-1].get("parts", {}):
        if any(name not in look["parts"] for look in looks):  # the run was resumed with an environment more
            continue
        of_looks, of_gain = [look["parts"][name] for look in looks], gain["parts"].get(name) or {} if gain else {}
        if measure_of(*of_looks) == "accuracy":
            table.add_row(f"{name}, %", *_row(of_looks, of_gain, "accuracy", _percent))
        table.add_row(f"{name}, reward", *_row(of_looks, of_gain, "reward_mean", _number))
    return table


def _list_monitors(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the displayed names of a learned judge's monitors."""
    monitors = {name: f"{name} (not trained on)" for name in environment.get("monitors", [])}
    reference = environment.get("gap_reference")
    return monitors | ({"gap": f"gap (judge less {reference})"} if reference else {})


def _evaluation_title(content: Mapping[str, Any]) -> str:
    some, found = content["after"] or content["before"], outcome_of(content)
    intervals = f"; {100 * content['confidence']:.4g} % intervals" if some["num_prompts"] > 1 else ""
    # A single look is no gain, but may be of few prompts too
    words = WORDS["few"] if some["num_prompts"] < FEW_PROMPTS else found.words
    told = "" if words == WORDS["none"] else f"; {words}"
    return f"{prompts_in_words(content)}, greedy and {number_of(some['num_samples'], 'sample')}{intervals}{told}"


def _row(looks: Sequence[Mapping[str, Any]], gain: Mapping[str, Any], key: str, form: Form) -> list[str]:
    cells = [_cell(look[key], form, look) for look in looks]
    return [*cells, _cell(gain.get(key), form, looks[-1], sign=True)] if gain else cells


def _cell(estimate: Mapping[str, float] | None, form: Form, look: Mapping[str, Any], *, sign: bool = False) -> str:
    """Format an estimate with its interval, a dash for a missing one.

    A single prompt has no interval, and a change of few (`sign`) is marked.
    """
    if estimate is None or not is_number(estimate["value"]):
        return "-"
    value = ("+" if sign and estimate["value"] > 0 else "") + form(estimate["value"])
    if look["num_prompts"] < FEW_PROMPTS and sign:
        return f"{value}, too few to tell"
    has_ends = look["num_prompts"] > 1 and is_number(estimate["low"])
    return f"{value} [{form(estimate['low'])}, {form(estimate['high'])}]" if has_ends else value


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def phase_table(content: Mapping[str, Any]) -> Table:
    """Build the table of phases, longest first, with bars."""
    table = _table()
    table.add_column("phase")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    ordered = sorted(content["phases"].items(), key=lambda item: -item[1]["seconds"])
    for name, phase in ordered:
        shown = "the rest: loading, saving, logs" if name == UNTIMED else escape(str(name))
        table.add_row(shown, duration(phase["seconds"]), percent(phase["share"]), "█" * round(30 * phase["share"]))
    return table


def totals(content: Mapping[str, Any]) -> Text:
    """Return steps, tokens and memory on one line, problems on the next."""
    work = [
        number_of(content["steps"], "step"),
        number_of(content["tokens"], "token"),
        f"{content['tokens_per_second']:,.0f} tokens/s",
    ]
    done = work if content["steps"] else []
    lines = [" · ".join([content["status"], *done, f"{memory(content['peak_memory_bytes'])} at peak"])]
    if content.get("samplers"):
        lines.append(samplers_note(content["samplers"]))
    if content["skipped_steps"]:
        lines.append(f"{number_of(content['skipped_steps'], 'step')} skipped: loss or gradient was not finite")
    if content["dropped_groups"]:
        lines.append(f"{number_of(content['dropped_groups'], 'group')} sampled but not trained on")
    if content.get("reward_hacking"):
        lines.append(f"reward hacking? {content['reward_hacking']}")
    return Text("\n".join(map(escape, lines)))


def samplers_note(found: Mapping[str, Any]) -> str:
    """Describe the samplers' work in a run, from `SamplersTotals.described`.

    >>> samplers_note({"age_mean": 0.8, "age_max": 2.0, "trainer_waited_seconds": 3.1, ...})
    'trained on groups 0.8 versions old, 2 at most · trainer waited 3.10 s, samplers 0.41 s each · they drew 3,412
    tokens/s'
    """
    return (
        f"trained on groups {found['age_mean']:.1f} versions old, {found['age_max']:g} at most · trainer waited "
        f"{duration(found['trainer_waited_seconds'])}, samplers {duration(found['samplers_waited_seconds'])} each · "
        f"they drew {found['tokens_per_second']:,.0f} tokens/s"
    )


def side_by_side(runs: Mapping[str, Mapping[str, Any] | None]) -> Text:
    """Return before, after and gain of each run, dashes for missing ones."""
    lines: list[str] = []
    for name, content in runs.items():
        if content is None:
            lines.append(f"{name}: no summary")
            continue
        steps = f", {number_of(content['steps'], 'step')}" if content["steps"] else ""
        lines.append(f"{name}: {content['status']}{steps}")
        looks = [look for look in (content["before"], content["after"]) if look]
        for key in [key for key in MEASURES if looks and all(key in look for look in looks)]:
            form = _number if key == "reward_mean" else _percent
            lines.append(f"  {MEASURES[key]}  {_format_comparison(looks, content['gain'] or {}, key, form)}")
    return Text("\n".join(lines))


def _format_comparison(looks: Sequence[Mapping[str, Any]], gain: Mapping[str, Any], key: str, form: Form) -> str:
    """Format before, after and the gain with its interval."""
    if len(looks) == 1:
        return _cell(looks[0][key], form, looks[0])
    before, after = (form(value) if is_number(value := look[key]["value"]) else "-" for look in looks)
    return f"{before:>6} -> {after:>6}  gain {_cell(gain.get(key), form, looks[-1], sign=True)}"


def files(folder: Path) -> Text:
    """List the run's existing files to look at next."""
    paths = {name: folder / name for name in FILES}
    present = [(name, FILES[name]) for name, path in paths.items() if path.exists() and path.stat().st_size]
    width = max(map(len, FILES)) + 1
    return Text("\n".join(f"{name:<{width}}{what}" for name, what in present), style="dim")


FILES = {
    "report.html": "the report, for a browser",
    "checkpoints": "policies (covey export hands one on)",
    "policy": "the trained policy",
    "cold_start.json": "the cold-start policy and its accuracy",
    "tensorboard": "tensorboard --logdir shows it",
    "wandb": "wandb sync uploads it",
}
