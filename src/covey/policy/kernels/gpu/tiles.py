"""Rows in tiles of one group, which `cascade` reads prompts for.

Shapes: B rows, as many tiles, W rows of a tile.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from covey.policy.attention.base import Rule
from covey.policy.policy import to_device

TILE_ROWS = 8
MOST_QUERIES = 16
"""Query heads of a key head: more of eight rows do not fit into registers."""
WORTH = 8
"""Prompts are shared where an eighth of what rows read is a prompt read before."""


class Tiles:
    """Tables on the device, rewritten in place: graphs read them there."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._table_WB = torch.zeros((3 + TILE_ROWS, num_rows), dtype=torch.int32, device=device)
        self.group_T, self.length_T, self._prompt_B = self._table_WB[:3]
        self.row_TW = self._table_WB[3:].view(num_rows, TILE_ROWS)
        self._row_B = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._zero_T = torch.zeros_like(self._row_B)

    def write(self, prompts: Sequence[tuple[int, int]]) -> None:
        """Take each row's group and the length of its prompt."""
        num_rows = len(self._row_B)
        rows_of: dict[tuple[int, int], list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(prompt, []).append(row)
        starts = [(prompt, rows, start) for prompt, rows in rows_of.items() for start in range(0, len(rows), TILE_ROWS)]
        tiles = [rows[start : start + TILE_ROWS] for _, rows, start in starts]
        idle = num_rows - len(tiles)
        places = [row for tile in tiles for row in [*tile, *[-1] * (TILE_ROWS - len(tile))]] + [-1] * TILE_ROWS * idle
        table = [
            [prompt[0] for prompt, _, _ in starts] + [-1] * idle,
            [prompt[1] for prompt, _, _ in starts] + [0] * idle,
            [length for _, length in prompts] + [0] * (num_rows - len(prompts)),
            *(places[start : start + num_rows] for start in range(0, len(places), num_rows)),
        ]
        self._table_WB.copy_(to_device(table, self._table_WB.device, torch.int32))

    def attend(
        self,
        query_RHD: Tensor,
        shared: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        position_B: Tensor,
        rule: Rule,
    ) -> Tensor:
        """Return attention to prompts and to own tokens, (B, H, D)."""
        from covey.policy.kernels.gpu.cascade import LayerCache, attend  # needs triton

        prompts = LayerCache(*shared, self.row_TW, self.group_T, self._zero_T, self.length_T)
        tokens = LayerCache(*own, self._row_B[:, None], self._row_B, self._prompt_B, position_B + 1)
        return attend(query_RHD, prompts, tokens, self._prompt_B, position_B, rule)


def repeats_much(rows: Iterable[tuple[int, int, int]]) -> bool:
    """Return True where reading prompts once saves enough.

    `rows` are the length of each row's prompt, its most own tokens, and its group.
    """
    rows = list(rows)
    read = sum(prompt + most // 2 for prompt, most, _ in rows)
    once = sum({group: prompt for prompt, _, group in rows}.values())
    return WORTH * (sum(prompt for prompt, _, _ in rows) - once) >= max(1, read)
