"""What is refused before torch is imported, and what a refusal leaves behind: nothing."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from covey.cli.help import group_choices
from covey.cli.main import main
from covey.config.early import check_early
from covey.config.schema import Config
from covey.loop import train
from covey.policy.models.loading import load_policy
from covey.policy.models.naming import check_device
from covey.policy.models.nano import nano_tokenizer
from covey.policy.settings import ModelConfig
from covey.run import folder as run_folder
from covey.system import hub

from ..support.small import logging_as_it_was, small_config

ALONE = "from covey.cli.main import main; import sys; sys.modules['torch'] = None; sys.exit(main(sys.argv[1:]))"
"""The command where torch cannot be imported."""
ROWS = ["recipe=my_rewards", "model=nano", "data.path=rows.jsonl", "rewards=[mine:digits]"]
NEAR = "; did you mean digits?"


EACH_ALONE = """
import contextlib, io, json, os, sys
sys.modules["torch"] = None
from covey.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["config"])
for number, words in enumerate(json.load(sys.stdin)):
    if not os.fork():
        for descriptor in (1, 2):
            os.dup2(os.open(f"{number}.{descriptor}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.exit(main(words))
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    assert not os.path.exists("outputs"), words
"""
"""The same for one list of words after the other, in forks of what has composed once: they print to files."""


@pytest.fixture(autouse=True)
def _work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder, with modules and rows; the modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    hub.silence.cache_clear()
    fill(tmp_path)
    yield
    for name in ("mine", "starred", "made", "broken"):
        sys.modules.pop(name, None)


def fill(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(8)))
    (folder / "mine.py").write_text("def digits(completions, **columns):\n    return [1.0 for _ in completions]\n")
    (folder / "broken.py").write_text("def digits(:\n")
    (folder / "number.py").write_text("digits = 3\n")
    (folder / "lacking.py").write_text("import nowhere\n\ndef digits(completions, **columns):\n    return []\n")
    (folder / "folder").mkdir()
    (folder / "quantised").mkdir()
    (folder / "quantised" / "m.gguf").touch()
    (folder / "book.pth").touch()


@pytest.fixture
def closed() -> str:
    """Return an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def alone(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ALONE, *words], capture_output=True, text=True, timeout=60, env=os.environ | environment
    )


MISTAKES = [
    (["train", *ROWS, "rewards=[mine:digit]"], f"reward function mine:digit: module mine has no 'digit'{NEAR}"),
    (["check", *ROWS, "rewards=[yours:digits]"], "reward function yours:digits: cannot import yours: No module named"),
    (
        ["train", *ROWS, "rewards=[mine.py:digits]"],
        "cannot import mine.py: a module is named with dots and without .py; write mine:digits\n",
    ),
    (["train", *ROWS, "rewards=[broken:digits]"], "reward function broken:digits: cannot import broken: "),
    (["train", *ROWS, "rewards=[min:digits]"], "cannot import min: No module named 'min'; did you mean mine?"),
    (["train", *ROWS, "rewards=[number:digits]"], "reward function number:digits must be a function, got int"),
    (["train", *ROWS, "rewards=[lacking:digits]"], "cannot import lacking: No module named 'nowhere'"),
    (
        ["train", *ROWS, "rewards=[{function: mine:digits, args: {most: 3}}]"],
        "reward function mine:digits has no argument 'most'; it takes none",
    ),
    (["train", *ROWS, "rewards=[{function: mine:digit}]"], "reward function mine:digit: module mine has no 'digit'"),
    (["train", *ROWS, "data.path=missing.jsonl"], "no file or directory missing.jsonl"),
    (
        ["train", *ROWS, "data.path=https://huggingface.co/datasets/openai/gsm8k"],
        "datasets/openai/gsm8k; a data set of the hub is data.path=openai/gsm8k\n",
    ),
    (["train", *ROWS, "data.path=org/rows/main"], "a data set of the hub is data.path=org/rows data.subset=main\n"),
    (["train", *ROWS, "rewards=[mine]"], "no reward function 'mine'; write mine:FUNCTION; there is "),
    (
        ["train", *ROWS, "model.name=https://huggingface.co/org/model"],
        "org/model: there is no such folder; a hub name is model.name=org/model\n",
    ),
    (["train", *ROWS, "data.path=./missing"], "no file or directory ./missing"),
    (["train", *ROWS, "data.path=mine.py"], "mine.py must end in .jsonl, "),
    (["train", *ROWS, "data.path=shards/*.parquet"], "no file matches shards/*.parquet"),
    (["train", *ROWS, "data.path=mine:rows"], "module mine must define the function rows"),
    (["evaluate", "model.name=outputs/nothing/policy"], "model.name=outputs/nothing/policy: there is no such folder"),
    (["train", *ROWS, "model.name=./missing"], "model.name=./missing: there is no such folder"),
    (["train", *ROWS, "model.name=folder"], "model.name=folder is a folder without a model: it has no config.json"),
    (["evaluate", *ROWS, "model.name=rows.jsonl"], "model.name=rows.jsonl is a file; name the model's folder\n"),
    (
        ["evaluate", *ROWS, "model.name=book.pth"],
        "book.pth is a file; name the model's folder, or model.code=module:function, which makes a model of it\n",
    ),
    (
        ["train", *ROWS, "model.name=quantised"],
        "it has no config.json; covey export --from-gguf quantised/m.gguf --to FOLDER makes a folder for model.name",
    ),
    (
        ["train", *ROWS, "model.name=quantised/m.gguf"],
        "is a file; name the model's folder; covey export --from-gguf quantised/m.gguf --to FOLDER makes a folder ",
    ),
    (["train", "recipe=arithmetic", "algorithm.loss=dpo"], "algorithm.loss must be one of clip, reinforce, "),
    (["train", "recipe=arithmetic", "algorithm.ratio=tokens"], "algorithm.ratio must be one of token, sequence, "),
    (["train", "recipe=arithmetic", "model.device=tpu"], "model.device must be auto, cpu, cuda or cuda:N, got tpu"),
    (["cold-start", "recipe=arithmetic", "model.device=cuda:x"], "model.device must be auto, cpu, cuda or cuda:N, got"),
]


NOTHING = [
    *(["train"], ["train", "--multirun"], ["train", "algorithm.kl_coef=0"], ["train", "seed=1,2", "-m"]),
    *(["train", "hydra.run.dir=mine", "algorithm=dapo"], ["check"], ["cold-start", "cold_start.num_steps=5"]),
]
"""Trainings of nothing in particular."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Status, output and errors of every command of `MISTAKES` and `NOTHING` where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("alone")
    fill(folder)
    typed = [*(words for words, _ in MISTAKES), *NOTHING]
    done = subprocess.run(
        [sys.executable, "-c", EACH_ALONE], input=json.dumps(typed), capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    printed = [[(folder / f"{n}.{descriptor}").read_text() for descriptor in (1, 2)] for n in range(len(typed))]
    codes = [int(line) for line in done.stdout.split()]
    return {" ".join(words): (code, out, err) for words, code, (out, err) in zip(typed, codes, printed, strict=True)}


@pytest.mark.long
@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_wrong_path_name_or_device_is_one_line_without_torch(
    words: list[str], line: str, answers: dict[str, tuple[int, str, str]]
) -> None:
    code, out, err = answers[" ".join(words)]
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert line in err


@pytest.mark.long
@pytest.mark.parametrize("words", NOTHING, ids=" ".join)
def test_a_training_of_nothing_in_particular_says_what_to_type(
    words: list[str], answers: dict[str, tuple[int, str, str]]
) -> None:
    code, out, err = answers[" ".join(words)]
    assert (code, out) == (2, "")
    assert err == (
        f"covey: nothing says what to train: covey {words[0]} recipe=arithmetic is a first run; recipes: "
        f"{', '.join(group_choices()['recipe'])}; settings: covey {words[0]} --help\n"
    )


def test_what_may_be_right_is_left_to_those_who_load_it() -> None:
    Path("starred.py").write_text("from mine import *\n")
    Path("made.py").write_text("digits = lambda completions, **columns: [1.0 for _ in completions]\n")
    names = ["mine:digits", "starred:digits", "made:digits", "accuracy", {"function": "mine:digits", "args": {}}]
    assert check_early(small_config(rewards=names, data__path="org/name")) == []
    assert "made" not in sys.modules  # a name that is there is not imported for it
    for path in ("rows.jsonl", "folder", "*.jsonl", "org/name", "name", "mine:digits"):
        assert check_early(small_config(data__path=path)) == []
    for device in ("auto", "cpu"):
        check_device(device)


def test_torch_without_support_for_gpus_refuses_cuda_by_its_version_file(monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, Any] = {"cpu": "None", "gpu": "'12.8'"}
    for name, version in built.items():
        folder = Path(name, "torch")
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "version.py").write_text(f"cuda: str | None = {version}\nhip: str | None = None\nxpu = None\n")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", ["gpu", *sys.path])
    check_device("cuda:1")
    monkeypatch.setattr(sys, "path", ["cpu", *sys.path])
    with pytest.raises(ValueError, match=r"^model\.device=cuda:1 needs a CUDA device and there is none; use model"):
        check_device("cuda:1")


# ------------------------------------------------------------------------------------------------ the hub


@pytest.mark.long
@pytest.mark.parametrize("name", ["missing_model", "org/does-not-exist"])
def test_a_hub_that_cannot_be_reached_is_said_at_once(name: str, closed: str) -> None:
    done = alone(["train", *ROWS, f"model.name={name}"], HF_ENDPOINT=closed, HF_HUB_OFFLINE="0", no_proxy="*")
    assert done.returncode == 2
    assert done.stderr == (
        f"covey: model.name={name}: there is no such folder, and the hub ({closed}) cannot be reached "
        f"(Connection refused); model.name=FOLDER takes a folder\n"
    )
    assert not Path("outputs").exists()


def test_a_model_in_the_cache_is_taken_from_there_when_the_hub_is_silent(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    kept = tmp_path / "cache" / "models--org--kept"
    for file, text in {"refs/main": "abc", "snapshots/abc/config.json": "{}"}.items():
        (kept / file).parent.mkdir(parents=True)
        (kept / file).write_text(text)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("no_proxy", "*")
    (warning,) = check_early(small_config(model__name="org/kept"))
    assert warning.startswith(f"model.name=org/kept is taken from the cache: the hub ({closed}) cannot be reached (")
    assert constants.HF_HUB_OFFLINE  # its clients do not try again, each for a minute
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ValueError, match=r"^model\.name=org/other: there is no such folder, and the hub"):
        check_early(small_config(model__name="org/other"))
    with pytest.raises(ValueError, match=r"model.name=FOLDER takes a folder; did you mean model=nano\?$"):
        check_early(small_config(model__name="nanno"))
    with pytest.raises(ValueError, match=r"model.name=FOLDER takes a folder$"):  # no hint at its preset
        check_early(small_config(model__name="Qwen/Qwen2.5-0.5B"))


def test_a_hub_that_answers_is_asked_for_the_model_by_its_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("no_proxy", "*")
        assert check_early(small_config(model__name="org/anything")) == []
        assert not constants.HF_HUB_OFFLINE


def test_the_proxy_is_what_must_answer_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub._unreachable("https", "nowhere.invalid", None) == ""
    assert "refused" in hub._unreachable("https", "nowhere.invalid", None)


# ------------------------------------------------------------------------------------------------ what is left behind


def refuse(config: Config, folder: Path) -> None:
    for name in (run_folder.METRICS, run_folder.ROLLOUTS, run_folder.EVALUATIONS):
        (folder / name).touch()
    raise ValueError("rows.jsonl line 3: no prompt")


def test_a_run_that_was_refused_before_it_did_anything_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(main.__globals__["WORK"], "train", refuse)
    with logging_as_it_was():
        assert main(["train", "recipe=arithmetic"]) == 2
    assert not Path("outputs").exists()
    shown = capsys.readouterr()
    assert shown.err == "covey: rows.jsonl line 3: no prompt\n"
    assert "run folder" not in shown.out


def test_a_run_that_has_worked_keeps_its_log() -> None:
    folder = Path("outputs/date/time")
    folder.mkdir(parents=True)
    for name in run_folder.NOTHING_DONE:
        (folder / name).touch()
    for phases in ({"other": {}, "cold_start": {}}, {"other": {}, "sampling": {}}):
        (folder / "summary.json").write_text(json.dumps({"phases": phases}))
        assert not run_folder.discard_refused(folder)
    (folder / "summary.json").write_text(json.dumps({"phases": {"other": {}}}))
    assert run_folder.discard_refused(folder)
    assert not Path("outputs").exists()


@pytest.mark.parametrize("file", ["preflight.json", "metrics.jsonl", "notes.txt"])
def test_a_folder_in_which_anything_else_is_stays(file: str) -> None:
    folder = Path("outputs/date/time")
    folder.mkdir(parents=True)
    for name in run_folder.NOTHING_DONE:
        (folder / name).touch()
    (folder / file).write_text("something")
    assert not run_folder.discard_refused(folder)
    assert {path.name for path in folder.iterdir()} == run_folder.NOTHING_DONE | {file}
    (folder / "summary.json").write_text('{"phases": {"preflight": {}}}')
    assert run_folder.discard_refused(folder, keeps_checks=False) == (file == "preflight.json")


def test_a_program_that_calls_train_is_told_as_early() -> None:
    with pytest.raises(ValueError, match=r"^model\.name=\./missing: there is no such folder$"):
        train(small_config(model=ModelConfig(name="./missing")), "run")
    assert not Path("run").exists()


def test_a_folder_or_file_without_a_model_is_refused_wherever_a_policy_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("nano", "quantised"):
        Path(name).mkdir(exist_ok=True)
    Path("quantised/m.gguf").touch()
    for name in ("quantised", "quantised/m.gguf"):
        with pytest.raises(ValueError, match="covey export --from-gguf"):
            load_policy(name)
    assert load_policy("nano").tokenizer.eos_token  # a folder of that name is not meant


def saved_tokens(folder: Path, numbers: Mapping[str, int]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tokenizer = {"model": {"vocab": dict(numbers)}, "added_tokens": [{"content": "<end>", "id": 9}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("setting", ["teacher", "reference_model"])
def test_a_model_beside_the_policy_is_looked_at_before_anything_is_loaded(setting: str, tmp_path: Path) -> None:
    own = saved_tokens(tmp_path / "own", {"a": 0, "b": 1})
    same = saved_tokens(tmp_path / "same", {"a": 0, "b": 1, "c": 2})
    other = saved_tokens(tmp_path / "other", {"a": 0, "b": 2})

    def look(name: Path | str) -> list[str]:
        return check_early(small_config(model__name=str(own), **{f"algorithm__{setting}": str(name)}))

    assert look(same) == []
    with pytest.raises(ValueError, match=rf"^algorithm\.{setting}=/no/such: there is no such folder$"):
        look("/no/such")
    with pytest.raises(ValueError, match=r"its tokenizer numbers others: 'b' is 2, and 1 in "):
        look(other)
    with pytest.raises(ValueError, match=r"numbers others: 'a' is 0, and 68 in nano$"):
        check_early(small_config(model__name="nano", **{f"algorithm__{setting}": str(own)}))
    nano = saved_tokens(tmp_path / "nano", nano_tokenizer().get_vocab())
    assert check_early(small_config(model__name="nano", **{f"algorithm__{setting}": str(nano)})) == []


def test_a_server_is_asked_for_before_anything_is_loaded(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_early(small_config(algorithm__teacher="self")) == []
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(ValueError, match=rf"^algorithm\.teacher={closed} must be a server that lists its model, got "):
        check_early(small_config(algorithm__teacher=closed))
    with pytest.raises(ValueError, match="must be a server that lists its model"):
        check_early(small_config(algorithm__teacher="http://[::1"))
