"""What foreign code notes, as plain data: what JSON can hold, and a checkpoint that unpickles nothing else."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Array(Protocol):
    def tolist(self) -> Any: ...


def plain_data(value: Any) -> Any:
    """Return what JSON can hold of a value: numbers of arrays as numbers, what is no data as text.

    >>> plain_data({"scores": np.array([0.5, 1.0]), "file": Path("a.txt")})
    {'scores': [0.5, 1.0], 'file': 'a.txt'}
    """
    value = value.tolist() if isinstance(value, Array) else value
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    # Not what is derived from these, such as members of an enumeration
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and abs(value) < float("inf"):
        return float(value)
    return str.__str__(value) if isinstance(value, str) else str(value)
