"""The command `covey`: dispatch of verbs, with Hydra's overrides for training.

Imports nothing heavy before it is needed, so that help, completion and a typing error answer at once.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

from covey import __version__
from covey.cli import help as usage
from covey.cli.verbs import OWN, all_verbs, command_of, part
from covey.system import machine, ranks
from covey.system.text.escaping import escape
from covey.system.waits.signals import StopRequested

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig

    from covey.cli.job import Job
    from covey.config.schema import Config

LOGGER = logging.getLogger(__name__)
EXIT_USER_ERROR, EXIT_DEFECT, EXIT_INTERRUPTED = 2, 1, 130
LEAVE_SECONDS = 10.0
"""Seconds for the threads and exit handlers that libraries leave behind."""
HEARD_SECONDS = 10.0
"""Most seconds for the rank with a message; under torchrun the others end as soon as it has written it."""

QUIET_SECONDS = 9.0
"""Seconds between lines that name the pending wait."""

RUN_DIR = "hydra.run.dir="
CONFIG_FLAG, AGAINST = "--config", "--against"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 (user error), 1 (defect), 130 (Ctrl-C)."""
    code = _code_of(list(sys.argv[1:] if argv is None else argv))
    try:
        print(end="", flush=True)
    except OSError as error:
        code = code or report(error)
    if argv is None and threading.active_count() > 1:
        from covey.system.waits.watchdog import exit_within

        exit_within(LEAVE_SECONDS, code)
    if argv is None and ranks.world_size() > 1:
        ranks.leave(code)
    return code


def _code_of(words: list[str]) -> int:
    try:
        machine.prepare()
        return _dispatch(words)
    except StopRequested as stop:  # by all ranks together
        return stop.status if ranks.rank() else _say(str(stop), stop.status)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        return report(error)


def _dispatch(words: list[str]) -> int:
    verb, rest = (words[0], words[1:]) if words else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(usage.overview(all_verbs()))
        return 0
    if verb == "--version":
        print(f"covey {__version__}")
        return 0
    if verb in ("-sc", "--shell-completion"):
        return _complete(rest)
    if verb not in usage.VERBS or verb in OWN:
        return _without_settings(verb, rest)
    if "--help" in rest or "-h" in rest:
        print(usage.verb_help(verb))
        return 0
    from covey.cli import command_line

    asked: Any = None
    if verb == "evaluate":
        from covey.cli.flags import split_flags

        rest, flags = split_flags(rest, {AGAINST: "a policy to compare with"}, ())
        asked = flags.get(AGAINST, "")
    if verb == "audit":
        rest = command_line.read_audit(rest)
    if verb == "plan":
        rest, asked = part("plan flags")(rest)
    return _run(verb, command_line.arrange(verb, rest), asked)


def _without_settings(verb: str, words: list[str]) -> int:
    """Run or explain a verb that reads no settings."""
    is_asked = "--help" in words or "-h" in words
    if is_asked and verb in usage.VERBS:
        print(usage.verb_help(verb))
        return 0
    function = command_of(verb, words)
    if is_asked:
        from inspect import getdoc

        print(f"usage: covey {verb} ...\n\n{getdoc(function) or ''}".rstrip())
        return 0
    from covey.cli.flags import with_latest_run

    code = function(with_latest_run(words))
    return code if isinstance(code, int) else 0


def _run(verb: str, words: Sequence[str], asked: Any = None) -> int:
    """Compose the settings of each job and run the verb."""
    codes: list[int] = []
    folders: list[Path] = []
    named = [word.removeprefix(RUN_DIR).strip("'\"") for word in words if word.startswith(RUN_DIR)]

    def job(composed: "DictConfig") -> None:
        # Hydra would print a line of its own about an exception that leaves the job.
        try:
            folders.extend(_job(verb, composed, CliContext(file, added, before, asked)))
            codes.append(0)
        except Exception as error:
            codes.append(report(error))

    from covey.cli import job as composing
    from covey.run.folder import names_in

    before = next((found for folder in named if (found := names_in(folder)) is not None), None)
    sys.path.append(os.getcwd())  # module:function settings name modules beside the user
    words, file = _config_file(words)
    words, added = composing.insert_environment(verb, words, file)
    words = [*words, f"{RUN_DIR}."] if verb in ("config", "plan") else list(words)
    try:
        _with_hydra(f"covey {verb}", words, job)
    except OSError as error:  # of the job none leaves it
        if error.errno is None:  # a file of settings that is not there
            raise
        folder = next((word for word in words if word.startswith(RUN_DIR)), error.filename)
        raise ValueError(f"{folder}: the run folder cannot be made ({error.strerror}); name another") from error
    if len(folders) > 1 and ranks.rank() == 0:
        part("side by side")(folders)
    return max(codes, default=0)


def _config_file(words: Sequence[str]) -> "tuple[list[str], Path | None]":
    from pathlib import Path

    # The last --config counts, as with other flags
    places = [index for index, word in enumerate(words) if word == CONFIG_FLAG or word.startswith(f"{CONFIG_FLAG}=")]
    if not places:
        return list(words), None
    place = places[-1]
    is_apart = words[place] == CONFIG_FLAG
    file = Path(words[place + 1] if is_apart else words[place].partition("=")[2]).expanduser()
    if not file.is_file():
        inside = file / "config.yaml"
        raise ValueError(f"--config {file} is no file" + (f"; did you mean {inside}?" if inside.is_file() else ""))
    return [*words[:place], *words[place + 1 + is_apart :]], file


class CliContext(NamedTuple):
    """The objects of a command beside its settings."""

    file: "Path | None"
    """File given by --config."""
    added: str
    """A default, not typed."""
    before: list[str] | None
    """Contents of the run folder beforehand, None where there was no such folder."""
    asked: Any = None
    """Options from the flags of covey plan; for covey evaluate, the policy to compare with."""


@contextmanager
def _place_to_work(verb: str, job: "Job", wanted: "Path", *, is_exact: bool) -> "Iterator[Path]":
    """Start and join the ranks, and lock the run folder."""
    from covey.system.waits.running import Pulse

    # imports torch and transformers, for which a refused setting need not wait
    importing = Pulse(lambda seconds: _tell(f"importing torch and transformers, {seconds:.0f} s"), QUIET_SECONDS)
    with importing, machine.heavy_imports():
        from covey.cluster.trainers import trainer_ranks
        from covey.loop import train_rank
        from covey.run.checkpoints import resume
        from covey.system import collectives

    try:
        resume.check_before_ranks(job.config, job.old)
    except ValueError:  # resume=latest may have taken another run than was meant
        for note in job.notes:
            print(f"WARNING: {escape(note)}", file=sys.stderr)
        raise
    others = partial(train_rank, job.config, wanted, exact=is_exact, old=job.old)
    with (
        trainer_ranks(job.config.devices, others) if verb == "train" else nullcontext(),
        collectives.process_group(job.config.timeouts.ranks, job.config.model.device),
        resume.locked_run_folder(job.config, wanted, exact=is_exact, old=job.old) as folder,
    ):
        yield folder


def _job(verb: str, composed: "DictConfig", given: CliContext) -> "list[Path]":
    """Run one job in Hydra's folder; return the folders it used."""
    from dataclasses import asdict
    from pathlib import Path

    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from covey.cli import job as composing
    from covey.run import folder as run_folder
    from covey.system.text.masking import secrets_in

    hydra = HydraConfig.get()
    wanted = Path(hydra.runtime.output_dir)
    named = composing.names_folder()
    with ExitStack() as held:
        try:
            typed = [word for word in hydra.overrides.task if word != given.added]  # fills ${...} in
            with machine.heavy_imports():  # of torch, where a setting names a function
                job = composing.compose(verb, composed, typed, given.file)
            if verb in ("config", "plan"):
                composing.print_only(job, given.asked)
                return []
            if named and job.old is None and ranks.world_size() == 1:  # of several, the first may have begun this run
                run_folder.check_unused(wanted)
            _tell(*job.changed, *job.first_lines)
            folder = held.enter_context(_place_to_work(verb, job, wanted, is_exact=named))
        finally:
            if given.before is None:
                run_folder.discard_if_empty(wanted, num_parents=0 if named else 2)
        run_folder.begin_log(folder, tuple(secrets_in(asdict(job.config))))
        for note in job.notes:
            LOGGER.warning(note)
        if hydra.mode is RunMode.MULTIRUN:
            own = [word for word in typed if word not in sys.argv]  # all jobs have the others
            _tell(f"job {hydra.job.num}: {' '.join(own) or 'as typed'}")
        extra = (composing.evaluation_asked(given.asked, typed),) if verb == "evaluate" else ()
        work = partial(WORK[verb], job.config, folder, *extra)
        _work(verb, work, (job.config, folder), given.before, is_new=job.old is None)
    return [folder]


def _tell(*lines: str) -> None:
    from covey.system.disk import ignore_stdout_errors

    with ignore_stdout_errors():
        for line in lines if ranks.rank() == 0 else ():
            print(line, flush=True)


def _work(
    verb: str, work: Callable[[], None], of: "tuple[Config, Path]", before: list[str] | None, *, is_new: bool
) -> None:
    """Run it, and print summary and folder at any end.

    A new run that is refused leaves its message and the files that were there `before`.
    """
    from covey.cli.errors import is_user_error
    from covey.run.folder import discard_refused, read_summary
    from covey.system.disk import ignore_stdout_errors
    from covey.system.text.console import CleanConsole

    console, (config, folder) = CleanConsole(), of
    try:
        work()
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        LOGGER.info("the run ended here: %s", error, exc_info=not stopped)
        is_refused = is_new and isinstance(error, Exception) and is_user_error(error)
        if ranks.rank() == 0 and is_refused and discard_refused(folder, before=before):
            logging.getLogger().handlers.clear()  # one of them writes into it
        elif ranks.rank() == 0:
            if verb == "train":
                part("report")(config.output, folder)
            with ignore_stdout_errors():
                part("folder")(folder, console)
        raise
    if ranks.rank() > 0:
        return
    if verb == "train":
        part("report")(config.output, folder)
    content = read_summary(folder)
    with ignore_stdout_errors():
        if verb == "evaluate":
            part("worst answers")(folder, console)
        if content is None:
            part("folder")(folder, console)
        else:
            part("summary")(content, folder, console)


def _call(place: str, *arguments: Any) -> Any:
    from covey.system.lookup import resolve

    return resolve(place, {})(*arguments)


WORK: dict[str, Callable[..., None]] = {
    "train": partial(_call, "covey.loop:run_train"),
    **{
        verb: partial(_call, f"covey.cli.commands:run_{verb.replace('-', '_')}")
        for verb in ("cold-start", "judge", "evaluate")
    },
    "audit": partial(_call, "covey_preflight.command:run_audit"),
    "check": partial(_call, "covey_preflight.command:run_check"),
}


def _with_hydra(program: str, words: Sequence[str], job: Callable[["DictConfig"], None]) -> None:
    """Run Hydra, with its errors as exceptions."""
    import hydra

    from covey.config import compose as settings

    settings.register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise instead of print and exit
    with _arguments([program, *words]):
        if not any(word.lstrip("+").startswith(("-", "hydra.mode")) for word in words):
            settings.run_one(words, job)
            return
        hydra.main(version_base="1.3", config_path=str(settings.CONF), config_name="config")(job)()


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Set sys.argv, which Hydra reads and a run records."""
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


def _complete(words: Sequence[str]) -> int:
    """Complete a verb here, later words by Hydra without the verb."""
    # The shell passes the whole line in COMP_LINE
    line = os.environ.get("COMP_LINE", "")
    typed = line.split()
    asked = bool(words) and words[0].startswith("query=")
    if asked and (len(typed) < 2 or (len(typed) == 2 and not line.endswith(" "))):
        print(" ".join(all_verbs()))
        return 0
    if asked:
        rest = line.split(None, 2)[2:]
        os.environ["COMP_LINE"] = f"covey {rest[0] if rest else ''}"
    with redirect_stdout(StringIO()) as out:
        _with_hydra("covey", ["--shell-completion", *words], lambda composed: None)
    # Choices that only name a schema are no choices of the user's
    found = out.getvalue()
    print(" ".join(word for word in found.split() if "=schema_" not in word) if asked else found)
    return 0


def report(error: Exception) -> int:
    """Print an error; return the exit code."""
    import traceback

    from covey.cli.errors import explain, is_user_error, reported_by_other_rank
    from covey.system.disk import leave_broken_stdout
    from covey.system.text.masking import INDENT, clean

    if isinstance(error, BrokenPipeError) and leave_broken_stdout():  # `covey config | head`: who reads has enough
        return 0
    if ranks.world_size() > 1 and reported_by_other_rank(error):
        time.sleep(HEARD_SECONDS)  # a launcher ends all ranks with the first, and that must be the one that speaks
        return EXIT_USER_ERROR
    code = EXIT_USER_ERROR if is_user_error(error) else EXIT_DEFECT
    if code == EXIT_USER_ERROR and os.environ.get("COVEY_DEBUG") != "1":
        return _say(explain(error), code)
    lines = "".join(traceback.format_exception(error)).rstrip("\n")
    print(clean(lines).replace("\n", INDENT), file=sys.stderr)
    return code


def _by_words(text: str) -> str:
    """Break lines of the terminal between words."""
    from shutil import get_terminal_size
    from textwrap import fill

    return fill(text, get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)


def _say(text: str, code: int) -> int:
    from covey.system.text.masking import clean

    number = ranks.rank()
    with suppress(OSError):  # nobody reads it where the terminal is gone
        said = f"covey: rank {number}: {clean(text)}" if number else f"covey: {clean(text)}"
        print(_by_words(said) if sys.stderr.isatty() else said, file=sys.stderr)
    return code
