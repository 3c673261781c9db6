"""The verbs cold-start, evaluate, judge, audit and check."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path

from covey.cli.flags import EvaluationAsked
from covey.config.schema import Config
from covey.environments.base import facts_of
from covey.policy.models.naming import check_name, saved_step
from covey.run import cold_start, stages, trust
from covey.run.audit.measure import audit
from covey.run.audit.table import print_audit
from covey.run.folder import AUDIT, run_of
from covey.run.preflight import preflight
from covey.run.records.record import RunRecorder
from covey.run.records.summary import HELD_OUT
from covey.run.stages import evaluate_and_log, load_environment, load_run
from covey.system import collectives
from covey.system.disk import ignore_stdout_errors
from covey.system.jsonl import write_json
from covey.system.text.console import CleanConsole
from covey.system.text.masking import mask
from covey.system.waits.signals import Stopper


def run_cold_start(config: Config, output_dir: Path) -> None:
    """Train a policy on demonstrations and print its path."""
    with Stopper(config.output.shutdown_timeout).installed(), RunRecorder(config, output_dir) as record:
        environment = load_environment(config, record)
        waiting = record.watchdog.deadline("the cold start", "timeouts.cold_start")
        with record.timer.phase("cold_start"), waiting:
            start = cold_start.ensure(config, environment, record.say)
        record.say(f"cold start: {start.summary_line}")
        record.cold_start(asdict(start))


def run_evaluate(config: Config, output_dir: Path, asked: EvaluationAsked) -> None:
    """Measure the policy on the held-out prompts, without training it.

    With `against`, another policy is measured on the same prompts first.
    """
    names = [*([asked.against] if asked.against else []), config.model.name]
    with Stopper(config.output.shutdown_timeout).installed(), RunRecorder(config, output_dir) as record:
        for place, name in enumerate(names):
            check_name(name)
            if saved := run_of(name):
                trust.check_links(Path(name), saved, trusted=config.trust_run)
            own = replace(config, source="local", model=replace(config.model, name=name))
            if asked.is_whole:
                own = replace(own, data=replace(own.data, test_fraction=1.0))
            environment = load_environment(own, record)
            if asked.is_whole and not asked.has_number:
                number = len(environment.prompts("test"))
                own = replace(own, evaluation=replace(own.evaluation, num_prompts=number))
            run = load_run(own, environment, record)
            record.looked_at = "prompt" if asked.is_whole else HELD_OUT
            if len(names) == 1:
                evaluate_and_log(run, record, step=saved_step(name))
                continue
            record.sides = "against", "measured"
            record.say(f"{record.sides[place]}: {name}")
            evaluate_and_log(run, record, step=place)
            if place == 0:
                run.close()


def run_judge(config: Config, output_dir: Path) -> None:
    """Train missing judges, measure all and print their paths.

    ValueError where one is below its floor.
    """
    if config.environment.learned_judge != "trained":
        raise ValueError(f"covey judge needs environment=infill, got environment={config.environment.name}")
    with Stopper(config.output.shutdown_timeout).installed(), RunRecorder(config, output_dir) as record:
        environment = load_environment(config, record)
        write_json(record.folder / "judge.json", mask(facts_of(environment)))


def run_audit(config: Config, output_dir: Path) -> None:
    """Audit the environment on its first training rows."""
    with Stopper(config.output.shutdown_timeout).installed(), RunRecorder(config, output_dir) as record:
        environment = load_environment(config, record)
        with record.timer.phase("audit"):
            found = asyncio.run(audit(environment, "train", config.evaluation.num_prompts))
        told = found.as_json()
        write_json(record.folder / AUDIT, mask(told))
        with ignore_stdout_errors():
            print_audit(told, CleanConsole())


def run_check(config: Config, output_dir: Path) -> None:
    """Run the preflight on the policy. ValueError where a check fails."""
    if not config.preflight.enabled:
        raise ValueError("covey check needs preflight.enabled=true, got preflight.enabled=false")
    with Stopper(config.output.shutdown_timeout).installed(), RunRecorder(config, output_dir) as record:
        environment = load_environment(config, record)
        began = stages.run_cold_start(config, environment, record)
        run = load_run(replace(config, source="local"), environment, record, began=began)
        with record.timer.phase("preflight"):
            checks = preflight.run_checks(preflight.PreflightContext(run, config), record.say)
        preflight.write(checks, record.folder)
        if collectives.is_main_process():
            with ignore_stdout_errors():
                CleanConsole().print(preflight.table(checks))
        preflight.raise_on_failure(checks)
