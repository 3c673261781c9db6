"""Compute steps of a run again, and compare what comes of each.

The run is built as training builds it, in a scratch folder; its own records of a step are compared with the ones there.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.config.budget import resolve_budget
from covey.config.schema import Config
from covey.loop import train_step
from covey.policy import sharding
from covey.run import stages
from covey.run.build import Run, has_samplers
from covey.run.checkpoints import fingerprint
from covey.run.checkpoints.checkpoint import POLICY, load_state, save_policy
from covey.run.checkpoints.manifest import folder_name, read_manifest
from covey.run.folder import EVALUATIONS, METRICS, PROOF, ROLLOUTS, VERDICTS, begin_log
from covey.run.records.record import RunRecorder
from covey.run.records.step_metrics import StepResult
from covey.run.state import checkpoint_state, snapshot
from covey.system import collectives
from covey.system.jsonl import read_rows
from covey_report.runs.local_ranks import run_on_ranks
from covey_report.runs.replay import replay
from covey_report.verify.differences import Difference, StepRows, bits_of, compare_step, tensors_differ
from covey_report.verify.plan import Leg, StepRange
from covey_report.verify.proof import OWN_CODE, machine, split, total, unpack, weight_checks, weights_of

COMPARED = (METRICS, ROLLOUTS, EVALUATIONS, VERDICTS)
STATE_PARTS = ("step", "trainer", "source", "credit")
"""Parts of a checkpoint's state that follow from the run alone."""
MOST_BYTES = 1 << 40
Key = tuple[int, str]


@dataclass
class Recomputed:
    """The result of computing steps again."""

    steps: list[int] = field(default_factory=list)
    """Steps with the same numbers."""
    evaluations: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    """Checkpoints with the same tensors as were computed."""
    machine: dict[str, Any] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    """The first of each part that was computed from one state."""

    def text(self) -> str:
        return json.dumps(vars(self) | {"differences": [one.row() for one in self.differences]})


def compute_again(config: Config, past: Path, leg: Leg, ranges: Sequence[StepRange]) -> Recomputed:
    """Compute ranges in as many processes and threads as the run had."""
    with tempfile.TemporaryDirectory(prefix="covey-verify-") as aside:
        kind = _by_schedule if has_samplers(config) else _as_rank
        work = partial(kind, scratch_settings(config), past, tuple(ranges), Path(aside))
        if leg.ranks == 1:
            torch.set_num_threads(leg.threads)
            text = work()
        else:
            text = run_on_ranks(work, [leg.threads] * leg.ranks)
    found = json.loads(text)
    found["differences"] = [Difference(**one) for one in found["differences"]]
    return Recomputed(**found)


def scratch_settings(config: Config) -> Config:
    """Return the settings without what reports to others or stops early."""
    quiet = replace(config.output, trackers=[], callbacks=[], report=False, progress=False, show_rollouts=0)
    output = replace(quiet, traces=True, max_trace_bytes=MOST_BYTES)
    doctor, preflight = replace(config.doctor, enabled=False), replace(config.preflight, enabled=False)
    alone = replace(config, output=output, doctor=doctor, preflight=preflight, source="local", resume=None)
    return resolve_budget(alone)


def _as_rank(config: Config, past: Path, ranges: Sequence[StepRange], aside: Path) -> str:
    with collectives.process_group(config.timeouts.ranks, config.model.device), RunRecorder(config, aside) as record:
        if not collectives.is_main_process():
            begin_log(aside)
        again = Again.begin(config, past, record, ranges[0])
        for own in ranges:
            if again.outcome.differences and again.outcome.differences[-1].kind == "data":
                break
            again.compute(own)
        return again.outcome.text()


def _by_schedule(config: Config, past: Path, ranges: Sequence[StepRange], aside: Path) -> str:
    """Replay an asynchronous run up to the last drawn step."""
    made: list[Again] = []

    def watch(step: int, stepped: StepResult) -> bool:
        made[:] = made or [Again.of(record.run, record, past, is_replayed=True)]
        record.log_step(step - 1, stepped)
        goes_on = made[0].looked_at(step, ("trainer",))
        return goes_on and step < ranges[-1].last

    with collectives.process_group(config.timeouts.ranks, config.model.device), RunRecorder(config, aside) as record:
        if not collectives.is_main_process():
            begin_log(aside)
        replay(config, past, record, lambda text: None, watch)
        return made[0].outcome.text()


@dataclass
class Again:
    """A run that is computed again beside its records."""

    run: Run
    record: RunRecorder
    past: Path
    then: Mapping[Key, StepRows]
    now: "Tail"
    names: Sequence[str]
    """Trained tensors, in the order of their checks."""
    outcome: Recomputed

    @classmethod
    def begin(cls, config: Config, past: Path, record: RunRecorder, first: StepRange) -> "Again":
        """Build the run, and look at its prompts and first weights."""
        environment = stages.load_environment(config, record)
        began = stages.began_with(config, past, checkpoint_at(past, first.start)) if first.start > 0 else None
        if began is not None:
            record.say(f"the policy that the run began with is taken from {began}")
        began = began or stages.run_cold_start(config, environment, record)
        prompts = fingerprint.prompt_hash(environment)
        run = stages.load_run(config, environment, record, prompts, began=began)
        checks = [weight_checks(run.policy, trained=trained) for trained in (False, True)]
        again = cls.of(run, record, past)
        again._note(collectives.run_on_rank0(lambda: again._beginning_differs(first, prompts, *checks)))
        return again

    @classmethod
    def of(cls, run: Run, record: RunRecorder, past: Path, *, is_replayed: bool = False) -> "Again":
        """Return a run beside its records, with nothing compared yet."""
        names = [name for name, _ in weights_of(run.policy, trained=True)]
        outcome = Recomputed(machine=machine(run.policy) | {OWN_CODE: run.code})
        then = sort_rows({name: list(read_rows(past / name)) for name in (*COMPARED, PROOF)})
        return cls(run, record, past, then, Tail(record.folder, only_measured=is_replayed), names, outcome)

    def _beginning_differs(self, first: StepRange, prompts: str, frozen: bytes, trained: bytes) -> Difference | None:
        proof = [own.proof for own in self.then.values() if own.proof is not None]
        begun = [row for row in proof if row.get("kind") == "begin" and row["step"] <= first.start]
        row = begun[-1] if begun else {}
        had = row.get("prompts")
        if not had and first.start > 0:
            had = read_manifest(checkpoint_at(self.past, first.start)).get("prompts")
        if had not in (None, "", prompts):
            return Difference(first.start, changed_prompt(self.run, proof), "data")
        name = self.run.config.model.name
        if row.get("frozen", total(frozen)) != total(frozen):
            return Difference(
                first.start, f"weights of {name} that are not trained are not those that the run had", "data"
            )
        if first.start == 0 and row.get("weights", total(trained)) != total(trained):
            pairs = zip(self.names, split(unpack(row["tensors"])), split(trained), strict=False)
            other = [own for own, then, now in pairs if then != now]
            return Difference(
                0, f"the run began with other weights of {name}: tensor {other[0]}, {len(other)} in all", "data"
            )
        return None

    @property
    def _num_steps(self) -> int:
        return sum(kind == "train" for _, kind in self.then)

    def compute(self, own: StepRange) -> None:
        """Compute steps up to its first difference."""
        run, stopper = self.run, stages.make_stopper(self.run.config)
        if own.start > 0:
            stages.load_checkpoint(run, self.record, checkpoint_at(self.past, own.start))
        run.source.follow(own.start, run.config.num_steps)
        if own.start > 0:
            run.source.publish(own.start)
        if not self._evaluate_again(own.start):
            return
        for step in range(own.start, own.last):
            stepped = train_step(run, step, stopper)
            self.record.log_step(step, stepped)
            self.record.say(f"step {step + 1} of {self._num_steps} is computed again")
            if not self.looked_at(step + 1, STATE_PARTS):
                return

    def looked_at(self, step: int, state: Sequence[str]) -> bool:
        """Return True if a step, its evaluation and checkpoint are the same."""
        if not self._same((step, "train")):
            return False
        self.outcome.steps.append(step)
        is_evaluated = "source" in state  # with samplers of its own it is not
        return (not is_evaluated or self._evaluate_again(step)) and self._compare_checkpoint(step, state)

    def _evaluate_again(self, step: int) -> bool:
        """Evaluate again where the run did; return whether all is the same."""
        key = (step, "evaluate")
        if key not in self.then or step in self.outcome.evaluations:
            return True
        stages.evaluate_and_log(self.run, self.record, step)
        is_same = self._same(key)
        self.outcome.evaluations += [step] * is_same
        return is_same

    def _same(self, key: Key) -> bool:
        def look() -> Difference | None:
            return compare_step(key[0], self.then.get(key, NOTHING), self.now.new_rows().get(key, NOTHING), self.names)

        return self._note(collectives.run_on_rank0(look))

    def _compare_checkpoint(self, step: int, parts: Sequence[str]) -> bool:
        """Compare a kept checkpoint with what was computed."""
        checkpoint = checkpoint_at(self.past, step)
        if not collectives.run_on_rank0(lambda: (checkpoint / POLICY).is_dir()):
            return True
        policy = self.run.policy
        weights = sharding.full_state_dict(policy.model) if policy.sharded else None
        state = checkpoint_state(self.run, snapshot(self.run, self.record, step))

        def look() -> Difference | None:
            aside = self.record.folder / "policy-again"
            save_policy(policy, aside, weights)
            if (found := tensors_differ(checkpoint / POLICY, aside)) is not None:
                return Difference(step, f"{checkpoint.name}: {found[0]}", "weights", gap=found[1])
            old, new = load_state(checkpoint), state
            for part in parts:
                if (place := first_unequal(old.get(part), new.get(part), part)) is not None:
                    return Difference(step, f"{checkpoint.name}: state.pt: {place} differs", "weights")
            return None

        is_same = self._note(collectives.run_on_rank0(look))
        self.outcome.checkpoints += [step] * is_same
        return is_same

    def _note(self, found: Difference | None) -> bool:
        if found is not None:
            self.outcome.differences.append(found)
        return found is None


def checkpoint_at(past: Path, step: int) -> Path:
    """Return the place of a step's checkpoint."""
    return past / "checkpoints" / folder_name(step)


NOTHING = StepRows(None, {})


def sort_rows(files: Mapping[str, Sequence[dict[str, Any]]]) -> dict[Key, StepRows]:
    """Sort rows of several files by step and kind."""
    found: dict[Key, dict[str, list[dict[str, Any]]]] = {}
    for name, rows in files.items():
        for row in rows:
            key = row["step"], KIND_OF.get(name) or str(row.get("kind"))
            found.setdefault(key, {}).setdefault(name, []).append(row)
    return {key: StepRows(own.pop(PROOF, [None])[-1], own) for key, own in found.items()}


KIND_OF = {ROLLOUTS: "train", EVALUATIONS: "evaluate", VERDICTS: "evaluate"}
"""Kind of all rows of a file; rows of the others name theirs."""


class Tail:
    """Reads what was added to a run's files since the last look."""

    def __init__(self, folder: Path, *, only_measured: bool) -> None:
        """Drop nulls where `only_measured`: a replay measures less without signal."""
        self._folder, self._only_measured = folder, only_measured
        self._sizes = dict.fromkeys((*COMPARED, PROOF), 0)

    def new_rows(self) -> dict[Key, StepRows]:
        """Return new rows, by step and kind."""
        files: dict[str, list[dict[str, Any]]] = {}
        for name, size in self._sizes.items():
            if (self._folder / name).exists():
                with (self._folder / name).open("rb") as file:
                    file.seek(size)
                    content = file.read()
                self._sizes[name] = size + len(content)
                files[name] = [self._row(line) for line in content.split(b"\n") if line]
        return sort_rows(files)

    def _row(self, line: bytes) -> dict[str, Any]:
        row = json.loads(line)
        return {name: value for name, value in row.items() if not (self._only_measured and value is None)}


def changed_prompt(run: Run, proof: Sequence[Mapping[str, Any]]) -> str:
    """Name the first trained prompt whose row is not what it was."""
    prompts = run.environment.prompts("train")
    now = {prompt.id: content for prompt, (_, content) in zip(prompts, fingerprint.of_prompts(prompts), strict=True)}
    for row in proof:
        for group in row.get("groups") or () if row.get("kind") == "train" else ():
            if now.get(group["prompt"]) != group["content"]:
                return f"data: prompt {str(group['prompt'])[:80]} is not the row that step {row['step']} was trained on"
    return "data: the prompts are not those of the run; the others are rows that no recorded step was trained on"


def first_unequal(old: Any, new: Any, place: str) -> str | None:
    """Return the place of the first value that differs in two states."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        a, b = old.detach().cpu(), new.detach().cpu()
        is_same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_of(a), bits_of(b))
        return None if is_same else place
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
        return next((found for key in old if (found := first_unequal(old[key], new[key], f"{place}.{key}"))), None)
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return next((found for n, (a, b) in pairs if (found := first_unequal(a, b, f"{place}.{n}"))), None)
    return None if old == new else place
