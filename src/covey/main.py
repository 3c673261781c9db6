"""The command: covey train | cold-start | judge | evaluate | check | config, with Hydra's overrides; covey machines.

Imports nothing heavy before it is needed, so that help, completion and a typing error answer at once.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

from covey import __version__, launch, machine, usage
from covey.stopping import StopRequested

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig

    from covey.config import Config

EXIT_MENDABLE, EXIT_DEFECT, EXIT_INTERRUPTED = 2, 1, 130
LEAVE_SECONDS = 10.0
"""For the threads and exit handlers that libraries leave behind."""

HEARD_SECONDS = 10.0
"""For the rank that has something to say, at most; under torchrun the others end as soon as it has."""

RUN_DIR = "hydra.run.dir="

HYDRA_FLAGS = {
    "--help": 0, "-h": 0, "--hydra-help": 0, "--multirun": 0, "-m": 0, "--run": 0, "-r": 0, "--resolve": 0,
    "--info": 0, "-i": 0, "--cfg": 1, "-c": 1, "--package": 1, "-p": 1, "--config-name": 1, "-cn": 1,
    "--config-dir": 1, "-cd": 1,
}  # fmt: skip
"""Flags that may follow a verb, with the number of words each takes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit codes: 0, 2 (what the user can mend, in one line), 1 (a defect of covey), 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    machine.prepare()
    code = _code_of(words)
    if argv is None and threading.active_count() > 1:
        from covey.deadlines import leave_within

        leave_within(LEAVE_SECONDS, code)
    if argv is None and launch.world_size() > 1:
        launch.leave(code)
    return code


def _code_of(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except StopRequested as stop:  # by all ranks together
        return stop.status if launch.rank() else _say(str(stop), stop.status)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        return report(error)


def _dispatch(words: list[str]) -> int:
    verb, rest = (words[0], words[1:]) if words else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(usage.overview())
        return 0
    if verb == "--version":
        print(f"covey {__version__}")
        return 0
    if verb in ("-sc", "--shell-completion"):
        return _complete(rest)
    if verb not in usage.VERBS:
        raise ValueError(f'no verb "{verb}"{_near(verb, usage.VERBS)}; verbs: {", ".join(usage.VERBS)}')
    if "--help" in rest or "-h" in rest:
        print(usage.verb_help(verb))
        return 0
    if verb == "machines":
        from covey.environments.machines.command import run_command

        run_command(rest)
        return 0
    _check_flags(verb, rest)
    return _run(verb, rest)


def _check_flags(verb: str, words: Sequence[str]) -> None:
    """Refuse in one line what argparse would refuse in twenty."""
    skip = 0
    for word, after in zip(words, [*words, None][1:], strict=True):
        if not skip and "=" not in word and not word.startswith(("-", "~")) and os.path.exists(word):
            raise ValueError(f'"{word}" sets nothing; did you mean model.name={word}?')
        if skip or not word.startswith("-"):
            skip = max(0, skip - 1)
            continue
        flag, equals, _ = word.partition("=")
        if flag not in HYDRA_FLAGS:
            raise ValueError(f'no flag "{flag}"{_near(flag, HYDRA_FLAGS)}; see `covey {verb} --help`')
        skip = 0 if equals else HYDRA_FLAGS[flag]
        if skip and after is None:
            raise ValueError(f"{flag} needs a value")
    if verb == "config" and {"-m", "--multirun"} & set(words):
        raise ValueError("covey config prints one configuration; --multirun is for covey train")


def _near(word: str, known: Sequence[str] | dict[str, Any]) -> str:
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _run(verb: str, words: Sequence[str]) -> int:
    """Compose the settings (once, or for each job of a multirun) and do what the verb says."""
    codes: list[int] = []
    was_there = any(os.path.isdir(word.removeprefix(RUN_DIR)) for word in words if word.startswith(RUN_DIR))

    def job(composed: "DictConfig") -> None:
        # Hydra would print a line of its own about an exception that leaves the job.
        try:
            _job(verb, composed, was_there, added)
            codes.append(0)
        except Exception as error:
            codes.append(report(error))

    sys.path.append(os.getcwd())  # module:function settings name modules beside the user
    added = ""
    if verb == "evaluate":
        from covey import measuring

        words, added = measuring.with_environment(words)
    words = [*words, f"{RUN_DIR}."] if verb == "config" else list(words)
    _with_hydra(f"covey {verb}", words, job)
    return max(codes, default=0)


def _job(verb: str, composed: "DictConfig", was_there: bool, added: str) -> None:
    """One job in the folder that Hydra has made, or that `was_there` before; nobody typed the word `added`."""
    import logging
    from pathlib import Path

    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from covey import run_folder, settings

    hydra_config = HydraConfig.get()
    wanted = Path(hydra_config.runtime.output_dir)
    typed = [word for word in hydra_config.overrides.task if word != added]
    named = any(word.startswith(RUN_DIR) for word in hydra_config.overrides.hydra)
    with ExitStack() as held:
        try:
            old, composed = _resumed(verb, composed, typed)
            config = _measured(composed, typed) if verb == "evaluate" else settings.to_config(composed)
            notes = _notes(verb, config, typed)
            if verb == "config":
                print(settings.report(config), end="", flush=True)
                return
            from covey import resuming  # imports torch and transformers, for which a refused setting need not wait
            from covey.policy import distribution

            held.enter_context(distribution.joined(config.deadlines.ranks))
            folder = held.enter_context(resuming.owned(config, wanted, exact=named, old=old))
        finally:
            if not was_there:
                run_folder.discard_if_empty(wanted, num_parents=0 if named else 2)
        run_folder.begin_log(folder)
        for note in notes:
            logging.getLogger(__name__).warning(note)
        if hydra_config.mode is RunMode.MULTIRUN:
            print(f"job {hydra_config.job.num}: {' '.join(typed)}", flush=True)
        _work(verb, config, folder)


def _notes(verb: str, config: "Config", typed: Sequence[str]) -> list[str]:
    """What deserves a word before the work: typed settings that the verb does not read, runs that are passed over."""
    from pathlib import Path

    from covey import needs, run_folder

    idle = needs.check_typed(verb, config, typed, launch.world_size())
    alone = " in one process" if launch.world_size() == 1 else ""
    notes = [f"covey {verb}{alone} does not read {', '.join(idle)}"] if idle else []
    if "resume=latest" in typed:
        newer = run_folder.newer_trainings(Path(config.resume or ""), Path("outputs"))
        notes += [f"resume=latest passes over {path}, which is newer and has no checkpoint" for path in newer]
    if verb == "evaluate" and (run := run_folder.run_of(config.model.name)):
        from covey import measuring

        other = measuring.unlike_the_run(run, config, typed)
        notes += [f"unlike the run in {run}: {', '.join(other)}"] if other else []
    return notes


def _resumed(verb: str, composed: "DictConfig", typed: Sequence[str]) -> "tuple[Path | None, DictConfig]":
    """The run folder to go on with and its settings; None and what was composed for a new run."""
    from pathlib import Path

    if "resume" not in composed or composed.resume is None:
        return None, composed
    from covey import resuming

    if verb not in ("train", "config"):
        raise ValueError(f"resume={composed.resume} needs covey train, got covey {verb}")
    old = resuming.find_run(composed.resume, Path("outputs"))
    return old, resuming.settings_of(old, typed)


def _measured(composed: "DictConfig", typed: Sequence[str]) -> "Config":
    """The settings to evaluate with: what was typed, over those of the run that saved the policy; says so in a line."""
    from hydra.core.hydra_config import HydraConfig

    from covey import measuring, settings

    below = measuring.run_below(typed) if HydraConfig.get().job.config_name == "config" else None
    config = settings.to_config(measuring.laid_over(below, composed.model.name, typed) if below else composed)
    if launch.rank() == 0:
        print(measuring.first_line(config, typed, below), flush=True)
    return config


def _work(verb: str, config: "Config", folder: "Path") -> None:
    """Do it, and end with the summary and the name of the run folder, however it ends."""
    import logging

    from rich.console import Console

    from covey.disk import unheard
    from covey.summary import read_summary
    from covey.summary_tables import print_folder, print_summary

    console = Console()
    try:
        WORK[verb](config, folder)
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        logging.getLogger(__name__).info("the run ended here: %s", error, exc_info=not stopped)
        if launch.rank() == 0:
            with unheard():
                print_folder(folder, console)
        raise
    if launch.rank() > 0:
        return
    content = read_summary(folder)
    with unheard():
        if content is None:
            print_folder(folder, console)
        else:
            print_summary(content, folder, console)


def _train(config: "Config", folder: "Path") -> None:
    from covey.train import run_train as run

    run(config, folder)


def _cold_start(config: "Config", folder: "Path") -> None:
    from covey.verbs import run_cold_start as run

    run(config, folder)


def _judge(config: "Config", folder: "Path") -> None:
    from covey.verbs import run_judge as run

    run(config, folder)


def _evaluate(config: "Config", folder: "Path") -> None:
    from covey.verbs import run_evaluate as run

    run(config, folder)


def _check(config: "Config", folder: "Path") -> None:
    from covey.verbs import run_check as run

    run(config, folder)


WORK: dict[str, Callable[["Config", "Path"], None]] = {
    "train": _train,
    "cold-start": _cold_start,
    "judge": _judge,
    "evaluate": _evaluate,
    "check": _check,
}


def _with_hydra(program: str, words: Sequence[str], job: Callable[["DictConfig"], None]) -> None:
    """Hand the command line to Hydra, whose errors come back as exceptions."""
    import hydra

    from covey import settings

    settings.register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise instead of print and exit
    with _arguments([program, *words]):
        hydra.main(version_base="1.3", config_path=str(settings.CONF), config_name="config")(job)()


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and nothing else."""
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


def _complete(words: Sequence[str]) -> int:
    """Tab completion: verbs here, everything after the verb by Hydra, which must not see the verb."""
    line = os.environ.get("COMP_LINE", "")
    typed = line.split()
    asked = bool(words) and words[0].startswith("query=")
    if asked and (len(typed) < 2 or (len(typed) == 2 and not line.endswith(" "))):
        print(" ".join(usage.VERBS))
        return 0
    if asked:
        rest = line.split(None, 2)[2:]
        os.environ["COMP_LINE"] = f"covey {rest[0] if rest else ''}"
    with redirect_stdout(StringIO()) as out:
        _with_hydra("covey", ["--shell-completion", *words], lambda composed: None)
    found = out.getvalue()
    print(" ".join(word for word in found.split() if "=schema_" not in word) if asked else found)
    return 0


def report(error: Exception) -> int:
    """Print an error and give the exit code: one line where the user can mend it, else the traceback."""
    if isinstance(error, BrokenPipeError):  # `covey config | head`: whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

    import traceback

    from covey.explain import explain, is_heard_elsewhere, is_mendable

    if launch.world_size() > 1 and is_heard_elsewhere(error):
        time.sleep(HEARD_SECONDS)  # a launcher ends all ranks with the first, and that must be the one that speaks
        return EXIT_MENDABLE
    code = EXIT_MENDABLE if is_mendable(error) else EXIT_DEFECT
    if code == EXIT_MENDABLE and os.environ.get("COVEY_DEBUG") != "1":
        return _say(explain(error), code)
    traceback.print_exception(error)
    return code


def _say(text: str, code: int) -> int:
    number = launch.rank()
    print(f"covey: rank {number}: {text}" if number else f"covey: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
