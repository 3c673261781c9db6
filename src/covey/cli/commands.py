"""The verbs cold-start, evaluate and judge."""

from dataclasses import asdict, replace
from pathlib import Path

from covey.cli.flags import EvaluationAsked
from covey.config.schema import Config
from covey.environments.base import facts_of
from covey.policy.models.naming import check_name, saved_step
from covey.run import cold_start, trust
from covey.run.folder import run_of
from covey.run.records.record import RunRecorder
from covey.run.records.summary import HELD_OUT
from covey.run.stages import evaluate_and_log, load_environment, load_run
from covey.system.jsonl import write_json
from covey.system.machine import ask_for_large_pages
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
        write_json(record.folder / "cold_start.json", asdict(start))


def run_evaluate(config: Config, output_dir: Path, asked: EvaluationAsked) -> None:
    """Measure the policy on the held-out prompts, without training it.

    With `against`, another policy is measured on the same prompts first.
    """
    ask_for_large_pages()
    names = [*([asked.against] if asked.against else []), config.model.name]
    with Stopper(config.output.shutdown_timeout).installed(), RunRecorder(config, output_dir) as record:
        for place, name in enumerate(names):
            check_name(name, config.model.code)
            if saved := run_of(name):
                trust.check_links(Path(name), saved, trusted=config.trust_run)
                trust.check_code(Path(name), saved, config.model.code, trusted=config.trust_run)
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
    """Train missing judges, measure all and print their paths. ValueError where one is below its floor."""
    if config.environment.learned_judge != "trained":
        raise ValueError(f"covey judge needs environment=infill, got environment={config.environment.name}")
    with Stopper(config.output.shutdown_timeout).installed(), RunRecorder(config, output_dir) as record:
        environment = load_environment(config, record)
        write_json(record.folder / "judge.json", mask(facts_of(environment)))
