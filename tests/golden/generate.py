"""Writes the golden values: `python -m tests.golden.generate`, from the root of the repository.

The numbers come from the formulas in formulas/, evaluated with 60 digits, and the inputs from a seed in settings/.
Nothing here imports covey or torch: a mistake would have to be made twice, in two ways, to go unseen.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .formulas.table import expected
from .settings import advantages, kl, losses, off_policy, others, teacher, turns
from .settings.draws import Document, Draw

VALUES = Path(__file__).parent / "values"
DOCUMENTS: tuple[Document, ...] = (
    *advantages.DOCUMENTS,
    *losses.DOCUMENTS,
    *kl.DOCUMENTS,
    *off_policy.DOCUMENTS,
    *others.DOCUMENTS,
    *turns.DOCUMENTS,
    *teacher.DOCUMENTS,
)


def text_of(document: Document) -> str:
    """Return the file of a document: each batch of inputs on a line, then each case, which names its batch."""
    batches: dict[str, int] = {}
    lines = [_dumps(record) for record in records(document, batches)]
    source = f'"source": {_dumps(document.source)}'
    return f"{{{source},\n{_block('inputs', list(batches))},\n{_block('cases', lines)}}}\n"


def _block(name: str, lines: list[str]) -> str:
    return f'"{name}": [\n' + ",\n".join(lines) + "\n]"


def records(document: Document, batches: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield what is written of each case, and number the batches that are new."""
    for index, case in enumerate(document.cases(Draw(document.name))):
        batch = batches.setdefault(_dumps(case.inputs), len(batches))
        answer = expected(document.name, case.params, case.inputs)
        head = {"id": f"{document.name}-{index:03}", "note": case.note, "params": case.params}
        yield head | {"inputs": batch, "expected": answer}


def _dumps(value: Any) -> str:
    return json.dumps(_encoded(value), allow_nan=False, separators=(",", ":"))


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_encoded(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _encoded(entry) for name, entry in value.items()}
    return value


def main() -> None:
    """Write every document, and remove what no document names."""
    VALUES.mkdir(exist_ok=True)
    for document in DOCUMENTS:
        (VALUES / f"{document.name}.json").write_text(text_of(document))
    for stale in set(VALUES.glob("*.json")) - {VALUES / f"{document.name}.json" for document in DOCUMENTS}:
        stale.unlink()


if __name__ == "__main__":
    main()
