"""Count the lines of `src` by package, and fail above the budget of `lines.toml`: `make lint` runs it.

A line is a physical line of a Python file. Whatever is added has to fit: it is paid for by what is deleted.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGET = Path(__file__).with_suffix(".toml")


def count_lines(source: Path) -> dict[str, int]:
    """Return the lines of Python of every top-level package below `source`, largest first."""
    packages = {folder.name: sorted(folder.rglob("*.py")) for folder in source.iterdir() if folder.is_dir()}
    lines = {name: sum(len(file.read_bytes().splitlines()) for file in files) for name, files in packages.items()}
    return dict(sorted(((name, number) for name, number in lines.items() if number), key=lambda item: -item[1]))


def check(lines: dict[str, int], budget: dict[str, int]) -> list[str]:
    """Return one error per number of the budget that is exceeded. The key `all` is the sum of all packages."""
    measured = {"all": sum(lines.values()), **lines}
    return [
        f"lines of {name} must be <= {limit:,}, got {measured[name]:,}: delete as much as you add, "
        f"or raise the number in {BUDGET.name} and say why there"
        for name, limit in budget.items()
        if measured.get(name, 0) > limit
    ]


def main(source: Path = ROOT / "src", budget_file: Path = BUDGET) -> int:
    """Print lines, budget and target of each package. Return the exit code."""
    budget = tomllib.loads(budget_file.read_text(encoding="utf-8"))
    lines = count_lines(source)
    for name, number in {"all": sum(lines.values()), **lines}.items():
        notes = [f"{what} {budget[what][name]:,}" for what in ("budget", "target") if name in budget[what]]
        print(f"{number:8,}  {name:20}{', '.join(notes)}".rstrip())
    errors = check(lines, budget["budget"])
    print("\n".join(errors), end="\n" if errors else "")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
