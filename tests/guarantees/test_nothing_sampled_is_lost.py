"""What was sampled and scored before a kill is not sampled again, and the run ends as if nobody had killed it."""

from pathlib import Path

import pytest

from .kills import Call, killed_run, prepare_slow, reference, seconds_lost
from .runs import fingerprint

Whole = tuple[str, list[Call]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kills")
    prepare_slow(made)
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return reference(folder)


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_and_after_loses_a_call_at_most(
    folder: Path, whole: tuple[str, list[Call]]
) -> None:
    lives = killed_run(folder, "killed", num_kills=3, seed=2, scale=0.1, most=1.5)
    assert max(seconds_lost(lives, whole[1])) <= 0.1 * 2 + 0.1
    assert fingerprint(folder / "killed") == whole[0]
    assert not (folder / "killed" / "journal").exists()
    log = (folder / "killed" / "covey.log").read_text()
    assert log.count("they are not sampled again; ") == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_of_a_run_with_slow_rewards_lose_two_seconds_each_at_most(
    folder: Path, whole: tuple[str, list[Call]]
) -> None:
    lives = killed_run(folder, "twenty", num_kills=20, seed=0)
    assert max(seconds_lost(lives, whole[1])) <= 2.1  # a call, and the moment until its verdict is written
    assert fingerprint(folder / "twenty") == whole[0]
