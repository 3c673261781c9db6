"""What is put back into a run that goes on."""

import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from covey.run.state import generators, restore, restore_generators
from covey.system import collectives


class Forgetful:
    """Takes any state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    before = generators()
    yield
    restore_generators(before)


def seeded(seed: int) -> dict[str, Any]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return generators()


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_second_of_two_normal_numbers_is_drawn_though_the_first_was_drawn_before() -> None:
    """Python and NumPy make two at a time."""
    for draw in (lambda: random.gauss(0.0, 1.0), lambda: float(np.random.randn())):
        draw()
        states = generators()
        expected = draw()
        draw()
        restore_generators(states)
        assert draw() == expected


def test_every_rank_resumes_its_generators_and_an_extra_rank_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_two_ranks = [seeded(7), seeded(8)]
    run = SimpleNamespace(trainer=Forgetful(), source=Forgetful(), credit=Forgetful())
    parts: dict[str, Any] = {"trainer": {}, "source": {}, "credit": {}, "record": {}}
    for rank, seed in ((0, 7), (1, 8), (2, 7)):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        seeded(seed)
        expected = drawn()
        seeded(9)
        assert restore(run, Forgetful(), {**parts, "step": 5, "generators": of_two_ranks}) == 5
        assert drawn() == expected


def test_only_the_own_gpus_generator_is_saved_so_fewer_gpus_can_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_back: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([3, 4], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", put_back.append)
    states = generators()
    restore_generators(states)
    assert len(states["cuda"]) == 1
    assert [state.tolist() for state in put_back] == [[3, 4]]
