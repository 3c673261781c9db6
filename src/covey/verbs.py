"""What the command does besides `train`: the cold start alone, and an evaluation alone."""

from dataclasses import asdict
from pathlib import Path

from covey import cold_start
from covey.build import build_environment, build_run
from covey.config import Config
from covey.record import Record
from covey.train import look


def run_cold_start(config: Config, output_dir: Path) -> None:
    """Warm a policy up and say where it lies; `model.name` takes that path."""
    with Record(config, output_dir) as record:
        with record.timer.phase("cold_start"):
            start = cold_start.ensure(config, build_environment(config), record.say)
        record.say(f"cold start: {start.story}")
        record.cold_start(asdict(start))


def run_evaluate(config: Config, output_dir: Path) -> None:
    """Measure the policy that `model` names on the held-out prompts, without training it: no cold start either."""
    with Record(config, output_dir) as record:
        environment = build_environment(config)
        run = build_run(config, environment, record.timer)
        record.begin(run)
        look(run, config, record, step=0)
