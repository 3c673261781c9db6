"""Stand in for the accelerator in scripts of TRL."""

from typing import Any

from covey.system import ranks


class Processes:
    """Training processes under the names of accelerate."""

    @property
    def is_main_process(self) -> bool:
        return ranks.rank() == 0

    @property
    def process_index(self) -> int:
        return ranks.rank()

    @property
    def num_processes(self) -> int:
        return ranks.world_size()

    def print(self, *words: Any, **keywords: Any) -> None:
        if self.is_main_process:
            print(*words, **keywords)
