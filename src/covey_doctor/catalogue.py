"""The table of findings in catalogue.yaml, and their rules."""

from pathlib import Path
from typing import Any

import yaml

from covey_doctor.finding import FindingRule
from covey_doctor.rules import policy, reward, sampler, signal, system

LOOKS = {module.__name__.rpartition(".")[2]: vars(module) for module in (policy, reward, sampler, signal, system)}


def _rule(row: dict[str, Any]) -> FindingRule:
    module, _, look = row["look"].partition(".")
    lists = {name: tuple(row.get(name, ())) for name in ("advice", "brings")}
    return FindingRule(**{**row, **lists, "look": LOOKS[module][look]})


_ROWS = yaml.load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
)
RULES: tuple[FindingRule, ...] = tuple(map(_rule, _ROWS))
