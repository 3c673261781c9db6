"""The official client and recipes of its cookbook, unchanged: `make test-doors` gives them an environment of their own.

They train SmolLM2-135M under the name of a model that the cookbook knows.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real.models import model_folder

pytestmark = pytest.mark.doors

ROOT = Path(__file__).resolve().parents[2]
CLIENT = Path(os.environ.get("COVEY_TINKER") or ROOT / ".venv-tinker/bin/python")
NAME = "Qwen/Qwen3-8B"
ONCE = ["eval_every=0", "save_every=0"]
GSM8K = {
    "": "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
    **{".batch_size": 3, ".group_size": 4, ".renderer_name": "qwen3", ".model_name_for_tokenizer": NAME},
}
"""The rows of `rl_basic`, whose command line takes them whole or not at all."""
SMALL = {
    "rl_loop": ["batch_size=3", "group_size=4", "max_tokens=8", "loss_fn=importance_sampling", "save_every=1"],
    "sl_loop": ["batch_size=3", "max_length=128", "save_every=1"],
    "rl_basic": ["max_tokens=8", *ONCE, *(f"dataset_builder{name}={value}" for name, value in GSM8K.items())],
    "math_rl.train": [
        *("env=arithmetic", "group_size=4", "groups_per_batch=4", "max_tokens=5", "learning_rate=1e-3", "max_steps=3"),
        *(*ONCE, "loss_fn=importance_sampling"),
    ],
}
STEPS = 3


class Served:
    """The command in a process of its own, which can be killed."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self.port = root, port
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "covey", "serve", f"{NAME}={model_folder('smollm2-135m')}"]
        flags = ["--to", str(self.root), "--port", str(self.port)]
        env = {**os.environ, "TINKER_API_KEY": "tml-test"}
        self.process = subprocess.Popen([*words, *flags], stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        assert "covey serve" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    folder = model_folder("smollm2-135m")
    if not (folder / "config.json").is_file():
        subprocess.run([sys.executable, "-m", "benchmarks.real.models", "smollm2-135m"], cwd=ROOT, check=True)
    found = Served(tmp_path / "state", 18000 + os.getpid() % 2000)
    yield found
    found.kill()


def workplace(root: Path) -> Path:
    """Return a folder where the cookbook finds tokenizer and rows instead of the hub."""
    names = root / NAME
    names.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_folder("smollm2-135m") / file, names / file)
    # A model this small answers in a box only after others did
    turn = "<|im_end|>\n<|im_start|>assistant\n\\boxed{3}<|im_end|>\n<|im_start|>user\n"
    asked = [f"What is 1 plus 2?{turn}What is 2 plus 1?{turn}What is {n} plus {3 - n}?" for n in range(9)]
    rows = [{"question": one, "answer": "#### 3"} for one in asked]
    talk = [
        {"messages": [{"role": "user", "content": one["question"]}, {"role": "assistant", "content": one["answer"]}]}
        for one in rows
    ]
    for name, config, content in (("openai/gsm8k", "main", rows), ("HuggingFaceH4/no_robots", "default", talk)):
        folder = root / name
        folder.mkdir(parents=True)
        splits = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{splits}---\n")
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in content))
    return root


def environment(served: Served, home: Path) -> dict[str, str]:
    assert CLIENT.is_file(), f"{CLIENT} has no client; make test-doors installs it"
    told = {"TINKER_BASE_URL": f"http://127.0.0.1:{served.port}", "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, **told, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(home / "cache")}


@pytest.mark.timeout(900)
def test_every_call_of_the_client_answers_and_repeats_to_the_bit(served: Served, tmp_path: Path) -> None:
    first = call_all(served, tmp_path)
    assert first["refused"]
    assert first["dense"] == pytest.approx(first["sparse"], rel=1e-6)
    assert call_all(served, tmp_path) == first


def call_all(served: Served, home: Path) -> Mapping[str, Any]:
    script = Path(__file__).with_name("client") / "every_call.py"
    words = [str(CLIENT), str(script)]
    found = subprocess.run(
        words, env=environment(served, home), cwd=home, capture_output=True, text=True, check=False, timeout=400
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return dict(json.loads(found.stdout))


def begin_recipe(served: Served, home: Path, name: str, log: Path) -> "subprocess.Popen[str]":
    words = [str(CLIENT), "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}", f"log_path={log}"]
    url = f"base_url=http://127.0.0.1:{served.port}"
    env = environment(served, home)
    return subprocess.Popen([*words, url, *SMALL[name]], env=env, cwd=home, stderr=subprocess.PIPE, text=True)


def rows_of(log: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("time", "progress/"))} for row in rows]


def finish(recipe: "subprocess.Popen[str]", log: Path) -> list[dict[str, Any]]:
    _, said = recipe.communicate(timeout=400)
    assert recipe.returncode == 0, said[-2000:]
    return rows_of(log)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_gives_the_same_numbers_on_a_fresh_server_and_through_a_kill(
    served: Served, tmp_path: Path, name: str
) -> None:
    home = workplace(tmp_path / "home")
    whole = finish(begin_recipe(served, home, name, tmp_path / "a"), tmp_path / "a")
    assert len(whole) >= STEPS  # a last row sums up
    assert len({json.dumps(row, sort_keys=True) for row in whole}) == len(whole)
    served.kill()
    served.root = tmp_path / "fresh"
    served.start()
    log = tmp_path / "b"
    recipe = begin_recipe(served, home, name, log)
    while not (log / "metrics.jsonl").is_file() or not rows_of(log):
        assert recipe.poll() is None
        time.sleep(0.05)
    served.kill()
    assert len(rows_of(log)) < STEPS
    served.start()
    assert finish(recipe, log) == whole
