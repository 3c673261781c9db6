"""Scripts as TRL's users write them, one import changed, on a real model, checks before the run included."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parents[1] / "trl" / "scripts"
THEIRS, OURS = "from trl import GRPOConfig, GRPOTrainer", "from covey.trl import GRPOConfig, GRPOTrainer"
CASES = {
    "float32": ("conversational", "bf16=False", "bf16=False"),
    "bfloat16, adapters": ("lora", "bf16=False", "bf16=True"),
    "float16, adapters": ("lora", "bf16=False", "bf16=False, fp16=True"),
}
"""Script, and what is written in the place of its precision."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "float32" else pytest.mark.long) for case in CASES]
)
def test_a_script_trains_a_real_model(
    case: str, real_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, written, precision = CASES[case]
    source = (SCRIPTS / f"{name}.py").read_text()
    assert (source.count(THEIRS), source.count(written)) == (1, 1)
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__", "MODEL": str(real_model("smollm2-135m"))}
    exec(compile(source.replace(THEIRS, OURS).replace(written, precision), f"{name}.py", "exec"), scope)
    assert scope["trainer"].state.global_step == 2
