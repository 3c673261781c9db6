"""Settings of the rows that an environment reads."""

from dataclasses import dataclass
from pathlib import Path

from covey.environments.registry import known_class
from covey.system.lookup import is_function_path
from covey.system.section import Section
from covey.system.setting import Requires, is_set, setting


def has_named_splits(path: str | None) -> bool:
    return path is None or not (Path(path).expanduser().is_file() or is_function_path(path))


READS_ROWS = Requires(
    "an environment that reads rows", ("environment.name",), lambda name: known_class(name).reads_rows != "never"
)
HAS_PATH = Requires(
    "data.path set", ("data.path", "environment.name"), lambda path, name: path is not None or name == "mixture"
)
OF_REWARD_FUNCTIONS = Requires(
    "environment=reward_functions", ("environment.name",), lambda name: known_class(name).takes_rewards
)
NAMED_SPLITS = Requires("data.path = a folder or a hub name", ("data.path",), has_named_splits)


@dataclass
class DataConfig(Section):
    """Rows of a data set, for environments that read one."""

    path: str | None = setting(None, needs=READS_ROWS)
    """A file (JSON lines, JSON, CSV, TSV, Parquet, Arrow), a folder of them, a pattern such as shards/*.parquet, what
    save_to_disk wrote, a hub name, or module:function."""
    subset: str | None = setting(None, needs=(READS_ROWS, HAS_PATH, NAMED_SPLITS))
    """Configuration name of a hub data set, or of a folder with its data card."""
    train_split: str = setting("train", needs=(READS_ROWS, HAS_PATH, NAMED_SPLITS))
    """Split to train on."""
    test_split: str = setting("test", needs=(READS_ROWS, HAS_PATH, NAMED_SPLITS))
    """Split to evaluate on; where the data has none, `test_fraction` of the rows is held out."""
    test_fraction: float = setting(0.1, needs=(READS_ROWS, HAS_PATH))
    """Share of rows held out when there is no test split."""
    prompt_column: str = setting("prompt", needs=(READS_ROWS, HAS_PATH, OF_REWARD_FUNCTIONS))
    """Column that holds the prompt (text or messages) for environment=reward_functions and tools."""
    answer_column: str | None = setting(None, needs=(READS_ROWS, HAS_PATH, OF_REWARD_FUNCTIONS))
    """Column that the assistant's message at the end of a conversation is moved to; null refuses such rows."""
    prefill: bool = setting(False, needs=(READS_ROWS, HAS_PATH, OF_REWARD_FUNCTIONS))
    """Have the policy continue the assistant's message at the end of a conversation."""
    max_rows: int | None = setting(None, ge=1, needs=(READS_ROWS, HAS_PATH))
    """Take at most this many rows of each split."""
    shuffle_rows: bool = setting(
        True, needs=(READS_ROWS, HAS_PATH, Requires("data.max_rows set", ("data.max_rows",), is_set))
    )
    """Take those `max_rows` at random, the same ones every time; false takes the first."""
    bad_rows: str = setting("error", choices=("error", "skip"), needs=(READS_ROWS, HAS_PATH))
    """Treatment of a broken line: error (names file and line) or skip (counted)."""
