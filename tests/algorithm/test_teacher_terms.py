"""The terms of a teacher, in numbers."""

import torch

from covey.algorithm.teacher.terms import Taught, advantage


def test_later_gaps_fade_by_their_distance_but_not_into_a_branch() -> None:
    gaps_NT = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]], dtype=torch.float64)
    teacher_NT, mask_NT = torch.zeros_like(gaps_NT), torch.ones_like(gaps_NT).bool()
    places_NT = torch.tensor([[3, 4, 6], [7, 9, 5]])  # the last token of the second begins a branch
    taught = Taught(gaps_NT, gaps_NT, gaps_NT, teacher_NT, mask_NT, places_NT)
    assert advantage(taught, discount=0.5).tolist() == [[-2.5, -3.0, -4.0], [-2.5, -6.0, -4.0]]
