"""What scripts of TRL ask their accelerator: who among the processes speaks."""

from typing import Any

from covey.system import ranks


class Processes:
    """Hold what is known of the processes that train together, under the names of accelerate."""

    @property
    def is_main_process(self) -> bool:
        """Return whether this process speaks for all."""
        return ranks.rank() == 0

    @property
    def process_index(self) -> int:
        """Return the number of this process."""
        return ranks.rank()

    @property
    def num_processes(self) -> int:
        """Return how many processes train together."""
        return ranks.world_size()

    def print(self, *words: Any, **keywords: Any) -> None:
        """Print in the process that speaks for all."""
        if self.is_main_process:
            print(*words, **keywords)
