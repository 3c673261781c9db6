"""Stand in for the accelerator in scripts of TRL."""

from typing import Any, TypeVar

from covey.system import collectives, ranks

Given = TypeVar("Given")


class Processes:
    """Training processes under the names of accelerate."""

    @property
    def is_main_process(self) -> bool:
        return ranks.rank() == 0

    @property
    def is_local_main_process(self) -> bool:
        return ranks.local_rank() == 0

    @property
    def process_index(self) -> int:
        return ranks.rank()

    @property
    def num_processes(self) -> int:
        return ranks.world_size()

    def print(self, *words: Any, **keywords: Any) -> None:
        if self.is_main_process:
            print(*words, **keywords)

    def wait_for_everyone(self) -> None:
        collectives.barrier("the script")

    def unwrap_model(self, model: Given, **keywords: Any) -> Given:
        """Return the model, which nothing wraps."""
        return model
