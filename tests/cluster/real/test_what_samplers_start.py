"""Programs that samplers run, on a real Ray: what they print is seen, and what they start ends with them."""

import os
import signal
from pathlib import Path

import pytest

from ...guarantees.runs import finish, new_run, num_trained, prepare, wait_until
from ...support.processes import are_gone, descendants
from .test_runs_on_ray import ROWS, SIZES, WITHOUT_END, samplers, stop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROGRAMS = (
    *(*SIZES, "environment=code", "environment.num_slots=2", "sampling.max_tokens=8", WITHOUT_END),
    *("source=ray", "devices.sampler=2", "max_staleness=2"),
)
SPEAKING = """
def varied(prompts, completions, **columns):
    print("a reward speaks", flush=True)
    return [sum(text.encode()) % 5 / 4 for text in completions]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    prepare(folder)
    return folder


def test_sandboxes_of_a_sampler_that_is_killed_leave_no_process(folder: Path) -> None:
    process = new_run(folder, "sandboxes", settings=PROGRAMS)
    assert wait_until(lambda: num_trained(folder / "sandboxes") >= 3 and len(samplers(process)) == 2, process)
    victim = min(samplers(process))
    family = descendants(victim)
    assert family, "the processes of its sandbox are there"
    os.kill(victim, signal.SIGKILL)
    assert are_gone(family, seconds=10)
    stop(folder / "sandboxes", process)


@pytest.mark.parametrize("place", ["true", "false"])
def test_what_a_reward_prints_in_a_sampler_is_seen(place: str, folder: Path) -> None:
    (folder / "varied_reward.py").write_text(SPEAKING)
    words = ("source=ray", "devices.sampler=1", f"environment.in_process={place}", "num_steps=8")
    process = new_run(folder, f"prints-{place}", *words, settings=tuple(word for word in ROWS if "workers" not in word))
    status, output = finish(process)
    assert status == 0, output
    assert any(line.startswith("sampler ") and line.endswith(": a reward speaks") for line in output.splitlines())
