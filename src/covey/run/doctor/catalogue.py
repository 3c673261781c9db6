"""The table of findings, which catalogue.yaml has, and the rules that look for them."""

from pathlib import Path
from typing import Any

from covey.run.doctor.finding import Rule
from covey.run.doctor.rules import policy, reward, sampler, signal, system
from covey.system.lookup import read_table

LOOKS = {module.__name__.rpartition(".")[2]: vars(module) for module in (policy, reward, sampler, signal, system)}


def _rule(row: dict[str, Any]) -> Rule:
    module, _, look = row["look"].partition(".")
    lists = {name: tuple(row.get(name, ())) for name in ("advice", "brings")}
    return Rule(**{**row, **lists, "look": LOOKS[module][look]})


RULES: tuple[Rule, ...] = tuple(_rule(dict(row)) for row in read_table(Path(__file__).with_suffix(".yaml")))
