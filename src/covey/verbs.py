"""What the command does besides `train`: the cold start, an evaluation or the preflight alone."""

import json
from dataclasses import asdict
from pathlib import Path

from covey import cold_start, preflight
from covey.build import build_run
from covey.cleaning import CleanConsole
from covey.config import Config
from covey.environments.base import Describes
from covey.environments.infill_settings import InfillConfig
from covey.masking import mask
from covey.policy import distribution
from covey.policy.naming import check_name, saved_step
from covey.record import Record
from covey.stopping import Stopper
from covey.train import look, made_environment, warmed


def run_cold_start(config: Config, output_dir: Path) -> None:
    """Warm a policy up and say where it lies; `model.name` takes that path."""
    with Stopper(config.output.grace_seconds).installed(), Record(config, output_dir) as record:
        environment = made_environment(config, record)
        waiting = record.watchdog.waiting("the cold start", "deadlines.cold_start")
        with record.timer.phase("cold_start"), waiting:
            start = cold_start.ensure(config, environment, record.say)
        record.say(f"cold start: {start.story}")
        record.cold_start(asdict(start))


def run_evaluate(config: Config, output_dir: Path) -> None:
    """Measure the policy that `model` names on the held-out prompts, without training it: no cold start either."""
    check_name(config.model.name)
    with Stopper(config.output.grace_seconds).installed(), Record(config, output_dir) as record:
        environment = made_environment(config, record)
        with record.watchdog.waiting(f"the model {config.model.name} to be loaded", "deadlines.loading"):
            run = build_run(config, environment, record.timer)
        record.begin(run)
        look(run, config, record, step=saved_step(config.model.name))


def run_judge(config: Config, output_dir: Path) -> None:
    """Train the judges that are not there yet, measure all, and say where they lie; ValueError below their floor."""
    if not isinstance(config.environment, InfillConfig):
        raise ValueError(f"covey judge needs environment=infill, got environment={config.environment.name}")
    with Stopper(config.output.grace_seconds).installed(), Record(config, output_dir) as record:
        environment = made_environment(config, record)
        assert isinstance(environment, Describes)
        (record.folder / "judge.json").write_text(json.dumps(mask(environment.facts()), indent=2) + "\n")


def run_check(config: Config, output_dir: Path) -> None:
    """The checks that precede a training run, on the policy it would train; ValueError where one fails."""
    if not config.preflight.enabled:
        raise ValueError("covey check needs preflight.enabled=true, got preflight.enabled=false")
    with Stopper(config.output.grace_seconds).installed(), Record(config, output_dir) as record:
        environment = made_environment(config, record)
        warm = warmed(config, environment, record)
        with record.watchdog.waiting(f"the model {warm.model.name} to be loaded", "deadlines.loading"):
            run = build_run(warm, environment, record.timer)
        record.begin(run)
        with record.timer.phase("preflight"):
            checks = preflight.examine(preflight.Subject(run, config))
        preflight.write(checks, record.folder)
        if distribution.is_first():
            CleanConsole().print(preflight.table(checks))
        preflight.refuse(checks)
