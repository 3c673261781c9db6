"""Promise 1, over processes: 1, 2 and 4 of them, with replicated or sharded weights, make the same update."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from covey.algorithm.aggregation import AGGREGATIONS
from covey.algorithm.losses import LOSSES
from covey.system import collectives

from ...support.processes import on_two_ranks
from ..ranks import LOCAL_COUNTS, STRATEGIES, cases, how_of, update_on_ranks, updates_of
from .updates import WHOLE, Update, distance, one_update

ROOT = Path(__file__).resolve().parents[3]
LONGEST = 280
"""Seconds for updates of two ranks, on a loaded machine; a third of those for all updates."""
NAMES = sorted(cases())
OF_TWO = ["loss=clip", "aggregation=seq_mean", "kl_full_lora", "m2po", "episodes", "bert"]
"""For each change: a loss, an average, adapters beside a reference, a rule over the batch, a tree, a masked policy.

`make test-slow` tries all, on four processes too, some of which have no loss token."""

Updates = dict[tuple[str, str], tuple[torch.Tensor, dict[str, float]]]


@cache
def in_one_process(name: str) -> Update:
    return one_update(cases()[name], WHOLE)


def assert_same_update(updates: Updates, name: str) -> None:
    limit = 1e-9 if cases()[name].dtype == torch.float64 else 1e-5
    for strategy in STRATEGIES:
        apart = distance(Update(*updates[name, strategy]), in_one_process(name))
        assert apart.gradient < limit, (strategy, apart)
        assert apart.metric < limit, (strategy, apart)


def computed_by(num_ranks: int, names: list[str], folder: Path) -> Updates:
    """Cases with every strategy, computed by that many processes under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*launcher, "-m", "tests.guarantees.ranks", str(folder), *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3 * LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: Updates = torch.load(folder / "updates.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Updates:
    """Of forks of this process, which import nothing anew; those of torchrun are slow."""
    first, _ = on_two_ranks(lambda: updates_of(OF_TWO), tmp_path_factory.mktemp("two"), LONGEST)
    return dict(first)


@pytest.mark.long
@pytest.mark.parametrize("name", OF_TWO)
def test_two_processes_make_the_update_of_one_under_ddp_and_fsdp(of_two: Updates, name: str) -> None:
    assert_same_update(of_two, name)


@pytest.mark.parametrize("name", ["m2po", "entropy"])
def test_two_forks_of_one_process_make_its_update_under_rules_over_the_whole_batch(name: str, tmp_path: Path) -> None:
    def work() -> tuple[torch.Tensor, dict[str, float]]:
        share = (collectives.rank(), collectives.world_size())
        update = update_on_ranks(cases()[name], how_of(name, share), "ddp")
        return update.gradient, update.metrics

    expected = in_one_process(name)
    for found in on_two_ranks(work, tmp_path):
        apart = distance(Update(*found), expected)
        assert apart.gradient < 1e-9, apart
        assert apart.metric < 1e-9, apart


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_several_processes_make_every_update_of_one(tmp_path: Path, num_ranks: int) -> None:
    updates = computed_by(num_ranks, NAMES, tmp_path)
    for name in NAMES:
        assert_same_update(updates, name)


def test_every_loss_and_every_aggregation_is_among_the_cases() -> None:
    assert {f"loss={loss}" for loss in LOSSES} <= set(NAMES)
    assert {f"aggregation={mode}" for mode in AGGREGATIONS} <= set(NAMES)


def test_four_ranks_are_more_than_the_groups_so_some_have_no_loss_token() -> None:
    assert len(cases()["loss=clip"].groups) == 3


@pytest.mark.long
def test_means_of_means_over_ranks_are_found_out(of_two: Updates) -> None:
    wrong = distance(Update(*of_two[LOCAL_COUNTS, "ddp"]), in_one_process("loss=clip"))
    assert wrong.gradient > 0.05
