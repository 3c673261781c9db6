"""`covey verify RUN`: compute random steps of a run again."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from covey.config import compose as settings
from covey.config.schema import Config
from covey.policy.models.naming import IN_MEMORY
from covey.run.build import has_samplers
from covey.run.checkpoints.saved_settings import parse_words, settings_of
from covey.run.folder import METRICS, changes_of
from covey.system.jsonl import read_rows
from covey.system.text.console import CleanConsole
from covey.system.text.format import number_of
from covey.system.waits.running import Pulse
from covey_report.runs.folders import read_flags, run_folder_of, whole_number
from covey_report.verify.claims import claims_changed, not_covered, unchecked_rows
from covey_report.verify.itself import ChangedFile, look_at_folder, read_proof, rows_misplaced
from covey_report.verify.judge import CONFIRMED, DIFFERS, EXIT_CODES, UNKNOWN, Judgement, judge
from covey_report.verify.plan import DrawnSteps, legs_of, make_plan, starts_of
from covey_report.verify.summary import files_changed, read_summary, write_summary

FLAGS = {"--steps": "a number", "--most": "a number", "--seed": "a number", "--out": "a file", "--again": "a file"}
STEPS, MOST_PER_STEP = 20, 10
"""Steps drawn unless --steps says otherwise, and steps of work for each unless --most does."""
BEAT_SECONDS = 20.0
"""Seconds between lines while steps are computed."""
ELSEWHERE = ("data.path", "model.name")
"""Settings that name what lies elsewhere on another machine: its content is compared, not its name."""
TRUST = "trust_run"
SUMMARY = "verified.json"

Row = dict[str, Any]
say = partial(CleanConsole().print, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """The words of a verification."""

    folder: Path
    typed: tuple[str, ...]
    steps: int
    most: int
    seed: int
    out: Path
    drawn: tuple[int, ...] = ()
    """Steps of an earlier summary, looked at again."""


def run_verify(words: Sequence[str]) -> int:
    """Verify a run; return 0 (confirmed), 1 (differs) or 2 (unknown)."""
    others, flags = read_flags(words, FLAGS)
    typed = [word for word in others if "=" in word]
    for override in parse_words(typed):
        if override.key_or_group not in (*ELSEWHERE, TRUST):
            raise ValueError(
                f"covey verify takes {', '.join((*ELSEWHERE, TRUST))} as settings, got {override.input_line}"
            )
    folder = run_folder_of("verify", [word for word in others if word not in typed])
    steps = whole_number(flags, "--steps", STEPS, least=1)
    asked = Asked(
        folder,
        tuple(typed),
        steps,
        whole_number(flags, "--most", MOST_PER_STEP * steps, least=1),
        whole_number(flags, "--seed", secrets.randbits(31)),
        Path(flags.get("--out", folder / SUMMARY)),
    )
    return EXIT_CODES[_again(asked, Path(flags["--again"])) if "--again" in flags else verify(asked).word]


def verify(asked: Asked) -> Judgement:
    """Verify a run, write the sealed summary, and say what was found."""
    proof = read_proof(asked.folder)
    found = [*rows_misplaced(asked.folder), *look_at_folder(asked.folder, proof)]
    found += claims_changed(asked.folder, proof)
    for one in found:
        say(f"differs: {one.text}")
    if any(one.step is None for one in found):
        return _close(asked, Judgement(DIFFERS, "files of the folder do not agree, so nothing was computed"), found, {})
    total = _num_steps(asked.folder)
    config = config_at(asked, len(changes_of(asked.folder)))
    if config.model.name.startswith(IN_MEMORY):
        return _close(asked, Judgement(UNKNOWN, "the run trained a model that a program held in memory"), found, {})
    plan = make_plan(
        [0] if has_samplers(config) else starts_of(asked.folder),
        legs_of(asked.folder, proof, total),
        asked.steps,
        asked.most,
        asked.seed,
        [*asked.drawn, *(one.step for one in found if one.step)],
    )
    return _compute(asked, plan, found, proof)


def _compute(asked: Asked, plan: DrawnSteps, found: Sequence[ChangedFile], proof: Sequence[Row]) -> Judgement:
    from covey_report.verify.again import compute_again

    if not plan.drawn:
        return _close(asked, Judgement(UNKNOWN, "no step can be reached from a kept state"), found, {})
    say(
        f"{number_of(len(plan.drawn), 'step')} drawn of {plan.reach} in reach, {plan.total} in all, seed {asked.seed}; "
        f"{number_of(plan.cost, 'step')} to compute from {number_of(sum(len(own) for _, own in plan.work), 'state')}"
    )
    facts: dict[str, Any] = {"seed": asked.seed, "drawn": list(plan.drawn), "reach": plan.reach, "total": plan.total}
    done: dict[str, list[int]] = {"steps": [], "evaluations": [], "checkpoints": []}
    verdicts: list[Judgement] = []
    configs = [config_at(asked, leg.changes) for leg, _ in plan.work]
    for config, (leg, ranges) in zip(configs, plan.work, strict=True):
        first, last = ranges[0].start, ranges[-1].last
        what = f"computing again what followed step {first}, up to step {last}"
        with Pulse(lambda seconds, what=what: say(f"{what}: {seconds:.0f} s"), BEAT_SECONDS):  # type: ignore[misc]
            outcome = compute_again(config, asked.folder, leg, ranges)
        for name, own in done.items():
            own += vars(outcome)[name]
        then = machine_then(asked.folder, proof, ranges[0].start)
        for one in outcome.differences:
            say(f"differs at step {one.step}: {one.what}")
        verdicts.append(judge(outcome.differences, then, outcome.machine, config))
        facts |= {"machine_then": then, "machine": outcome.machine}
        facts.setdefault("differences", []).extend(one.row() for one in outcome.differences)
    verdict = max(verdicts, key=lambda one: SEVERITY.index(one.word))
    if found:
        verdict = Judgement(DIFFERS, verdict.reason if verdict.word == DIFFERS else "a file is not what the run wrote")
    return _close(asked, verdict, found, facts | done)


SEVERITY = (CONFIRMED, UNKNOWN, DIFFERS)


def _close(asked: Asked, verdict: Judgement, found: Sequence[ChangedFile], facts: Mapping[str, Any]) -> Judgement:
    """Write the summary, and print the result."""
    kinds = ("step", "evaluation", "checkpoint")
    done = [number_of(len(own), kind) for kind in kinds if (own := facts.get(f"{kind}s"))]
    unchecked, others = unchecked_rows(asked.folder, facts.get("steps", ())), not_covered(asked.folder)
    told = verdict.reason + (f" ({unchecked})" if unchecked else "")
    say(f"{verdict.word}: {told}" + (f"; the same: {', '.join(done)}" if done else ""))
    say(f"not covered: {'; '.join(others)}")
    content = {"verdict": verdict.word, "reason": told, "found": [one.text for one in found], **facts}
    content["not_covered"] = others
    try:
        seal = write_summary(asked.out, asked.folder, content)
        say(f"summary: {asked.out} (sha256 {seal})")
    except OSError as error:
        say(f"no summary was written ({error}); --out FILE names another place")
    return verdict


def _again(asked: Asked, summary: Path) -> str:
    """Check a summary, then compute its steps again."""
    content = read_summary(summary)
    if changed := files_changed(asked.folder, content):
        say(f"differs: {summary} speaks of other files than {asked.folder} has: {', '.join(changed[:5])}")
        return DIFFERS
    drawn = tuple(int(step) for step in content.get("drawn", ()))
    out = asked.out if asked.out != summary else summary.with_name(f"{summary.stem}-again.json")
    verdict = verify(replace(asked, drawn=drawn, steps=max(1, len(drawn)), most=_num_steps(asked.folder), out=out))
    is_same = verdict.word == content["verdict"]
    here = "and so does this machine" if is_same else f"this machine {verdict.word}"
    say(f"{summary} says {content['verdict']}, {here}")
    return verdict.word


def _num_steps(folder: Path) -> int:
    """Return the number of recorded steps. ValueError for none."""
    steps = {row["step"] for row in read_rows(folder / METRICS) if row.get("kind") == "train"}
    if not steps:
        raise ValueError(f"{folder} has no finished step to verify")
    return len(steps)


def config_at(asked: Asked, num_changes: int) -> Config:
    """Return the settings after `num_changes` changes. ValueError for untrusted ones."""
    settings.register()
    names = [override.key_or_group for override in parse_words(asked.typed) if override.key_or_group != TRUST]
    control = f"resume_changes=[{','.join(names)}]"
    return settings.to_config(settings_of(asked.folder, [*asked.typed, control], num_changes))


def machine_then(folder: Path, proof: Sequence[Row], step: int) -> Mapping[str, Any]:
    """Return the machine of a step, empty where the run noted none."""
    began = [row["machine"] for row in proof if row.get("kind") == "begin" and row["step"] <= step]
    return began[-1] if began else {}
