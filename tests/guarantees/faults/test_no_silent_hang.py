"""Promise 7: every wait has a deadline and a name; a run that hangs says who waits for what, and ends or goes on."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.run.checkpoints.checkpoint import newest_valid
from covey.system.waits.watchdog_process import EXPIRED

from ...support.processes import are_gone
from ..runs import MASKED, fingerprint, finish_well, resume
from .hangs import Hang, Hung, orphans, start_all

LATE = 20.0
"""Seconds by which a loaded machine may be late."""

HANGS = {
    "engine": Hang(
        "from covey.engine.native.runner import Runner\nRunner.decode = hang_at(20, Runner.decode)",
        ("timeouts.sampling=2",),
        "the engine to sample a token (timeouts.sampling=2)",
        2.0,
    ),
    "engine_elsewhere": Hang(
        "from covey.engine.native.engine import NativeEngine\nNativeEngine.generate_telling = never_answer",
        ("timeouts.sampling=2",),
        "the engine to answer 1 prompt (timeouts.sampling=2)",
        2.0,
    ),
    "engine_that_fills": Hang(
        "from covey.engine import fill\nfill.fill_in = hang_at(5, fill.fill_in)",
        (*MASKED, "timeouts.sampling=2"),
        "the engine to fill in (timeouts.sampling=2)",
        2.0,
    ),
    "reward": Hang(
        "def varied(**columns): hang()",
        ("environment.timeout=2",),
        "the reward function varied (environment.timeout=2)",
        2.0,
    ),
    "reward_in_c": Hang(
        "def varied(**columns): note() and sum(range(10**14))",  # no other thread runs until it is done
        ("environment.timeout=2",),
        "the reward function varied (environment.timeout=2)",
        2.0,
    ),
    "environment": Hang(
        "from covey.environments.reward_functions.environment import RewardFunctions\n"
        "RewardFunctions.score_tokens = hang",
        ("environment.timeout=1", "timeouts.scoring=2"),
        "the environment reward_functions to score 1 prompt (timeouts.scoring=2)",
        4.0,  # the event loop is given two seconds to give it up first
    ),
    "data": Hang(
        'from covey.environments.data import files as row_files\nrow_files.READERS[".jsonl"] = hang',
        ("timeouts.loading=2",),
        "the environment to be made, with its data (timeouts.loading=2)",
        2.0,
    ),
    "model": Hang(
        "from covey.run import build\nbuild.load_policy = hang",
        ("timeouts.loading=5",),
        "the model nano to be loaded (timeouts.loading=5)",
        5.0,
    ),
    "update": Hang(
        "from covey.trainer.trainer import Trainer\nTrainer._backward = hang_at(3, Trainer._backward)",
        ("timeouts.update=5",),
        "the update of step 3 (timeouts.update=5)",
        5.0,
    ),
    "logs": Hang(
        "from covey.system.jsonl import JsonlWriter\nJsonlWriter.write = hang_at(5, JsonlWriter.write)",
        ("timeouts.saving=5", "environment.in_process=false"),  # with worker processes
        "the logs to be written (timeouts.saving=5)",
        5.0,
    ),
    "checkpoint": Hang(
        "import glob\nsync = os.fsync\n"
        "def sync_or_hang(file):\n"
        '    glob.glob("checkpoint/checkpoints/step-000010.tmp-*") and hang()\n'
        "    sync(file)\n"
        "os.fsync = sync_or_hang",
        ("evaluation.num_prompts=2", "timeouts.saving=5"),
        "the checkpoint of step 10 to be written (timeouts.saving=5)",
        5.0,
    ),
}
"""Eleven hangs that only the end of the run can end."""
QUICK = ("engine", "reward_in_c", "environment", "update", "checkpoint")
"""For every run of the tests: a wait in Python, in C, in the event loop, of the trainer and of a writer."""
EACH = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in HANGS]

Started = dict[str, tuple[Hung, threading.Thread]]


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The runs that selected tests look at, all at once."""
    words = {word for item in request.session.items for word in item.keywords}
    wanted = {name: hang for name, hang in HANGS.items() if name in words}
    runs = start_all(tmp_path_factory.mktemp("hangs"), wanted or HANGS)
    yield runs
    for hung, thread in runs.values():
        hung.process.kill()
        thread.join()


def ended(started: Started, name: str) -> Hung:
    hung, thread = started[name]
    thread.join()
    return hung


@pytest.mark.parametrize("name", EACH)
def test_a_run_that_hangs_says_within_the_deadline_what_it_waits_for_and_ends(name: str, started: Started) -> None:
    hung, expected = ended(started, name), HANGS[name]
    assert hung.status == -EXPIRED, hung.output
    said = re.findall(
        r"^covey: the run has waited ([\d.]+) s for (.*) and ends here; all stacks are in (.*)$", hung.output, re.M
    )
    assert [(what, log) for _, what, log in said] == [(expected.waited_for, f"{name}/covey.log")], hung.output
    assert expected.seconds <= float(said[0][0]) < expected.seconds + LATE
    # On a busy machine the wait may have begun long before what hangs in it.
    assert 0 < hung.ended - hung.since < expected.seconds + LATE
    assert are_gone(orphans(hung.folder, name))


@pytest.mark.parametrize("name", EACH)
def test_the_log_has_the_same_line_and_the_stacks_of_what_hangs(name: str, started: Started) -> None:
    hung = ended(started, name)
    log = (hung.run / "covey.log").read_text()
    assert f"s for {HANGS[name].waited_for} and ends here\n" in log
    place = "base_events" if name == "engine_elsewhere" else f"hanging_{name}.py"  # one waits in the event loop
    assert place in log.partition("and ends here\n")[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint"])  # by which `started` knows it
def test_a_run_with_a_hung_checkpoint_resumes_exactly(name: str, started: Started, reference: Path) -> None:
    hung = ended(started, name)
    found = newest_valid(hung.run / "checkpoints")
    assert found is not None
    assert found.name == "step-000005"
    finish_well(resume(hung.folder, name, "timeouts.saving=1800", "resume_changes=[timeouts.saving]"))
    assert fingerprint(hung.run) == fingerprint(reference / "whole")
