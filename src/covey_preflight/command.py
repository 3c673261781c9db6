"""The verbs audit and check."""

import asyncio
from dataclasses import replace
from pathlib import Path

from covey.config.schema import Config
from covey.run import stages
from covey.run.folder import AUDIT
from covey.run.records.record import RunRecorder
from covey.run.stages import load_environment, load_run
from covey.system import collectives
from covey.system.disk import ignore_stdout_errors
from covey.system.jsonl import write_json
from covey.system.text.console import CleanConsole
from covey.system.text.masking import mask
from covey.system.waits.signals import Stopper
from covey_preflight import preflight
from covey_preflight.audit.measure import audit
from covey_preflight.audit.table import print_audit


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
