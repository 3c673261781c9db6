"""vLLM is chosen where it is installed beside a GPU, and whatever was typed wins."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hydra import compose, initialize_config_dir

from covey.api.settings import make_config
from covey.cli import job
from covey.cli.main import main
from covey.config import compose as settings
from covey.config import engine_choice
from covey.config.auto_adjust import adjust_unset_options
from covey.config.engine_choice import HostDevices, this_machine
from covey.config.schema import Config
from covey.config.validate import validate

from ..support.small import logging_as_it_was

GPU = HostDevices(has_vllm=True, num_gpus=1)
MODEL = "model.name=Qwen/Qwen2.5-0.5B"


@pytest.fixture(autouse=True)
def vllm_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name can be found, which nothing imports."""
    module = ModuleType("vllm")
    module.__spec__ = __spec__
    monkeypatch.setitem(sys.modules, "vllm", module)


def chosen(*words: str, machine: HostDevices = GPU) -> tuple[str, list[str]]:
    """The engine of `covey train WORDS` on a machine, and what is said."""
    settings.register()
    with initialize_config_dir(str(settings.CONF), version_base="1.3"):
        config = settings.to_unchecked(compose("config", overrides=[MODEL, *words]))
    lines = adjust_unset_options(
        config, {word.partition("=")[0] for word in (MODEL, *words)} - {"recipe"}, lambda: machine
    )
    validate(config)
    return config.engine.name, lines


def test_vllm_beside_a_gpu_samples_by_itself_and_two_lines_say_so() -> None:
    engine, lines = chosen()
    assert engine == "vllm"
    assert lines == [
        "engine.name=vllm in place of native: vLLM is installed and there is a GPU; engine=native takes covey's own",
        "algorithm.correction=truncate in place of none: engine=vllm is another program than the trainer",
    ]


@pytest.mark.parametrize("words", [("model.lora_rank=4",), ("model.precision=bfloat16",), ("engine.max_rows=64",)])
def test_it_samples_these_too(words: tuple[str, ...]) -> None:
    assert chosen(*words)[0] == "vllm"


@pytest.mark.parametrize(
    "words",
    [
        ("engine=native",),
        ("engine=fake",),
        ("engine.name=native",),
        ("model.device=cpu",),
        ("model.precision=float64",),
        ("sampling.min_p=0.1", "sampling.top_p=0.9"),
        ("model.deterministic=true",),
        ("model.load_in_4bit=true", "model.lora_rank=4"),
        ("model.name=nano",),
        ("devices.trainer=2", "source=ray"),
    ],
)
def test_what_was_typed_wins(words: tuple[str, ...]) -> None:
    engine, lines = chosen(*words, machine=HostDevices(has_vllm=True, num_gpus=2))
    assert engine == ("fake" if words == ("engine=fake",) else "native")
    assert not any(line.startswith("engine.name") for line in lines)


@pytest.mark.parametrize("machine", [HostDevices(True, 0), HostDevices(False, 0), HostDevices(False, 4)])
def test_it_is_never_chosen_without_a_gpu_or_without_vllm(machine: HostDevices) -> None:
    assert chosen(machine=machine) == ("native", [])
    assert chosen("model.device=cuda", machine=machine)[0] == "native"


@pytest.mark.parametrize(
    ("machine", "words", "reason"),
    [
        (HostDevices(False, 1), {}, "vLLM is not installed"),
        (HostDevices(True, 0), {}, "vLLM is chosen on a GPU only"),
        (GPU, {"precision": "float64"}, "vLLM needs model.precision = float32, bfloat16 or float16"),
        (GPU, {"code": "my_gpt:load"}, "model.code=my_gpt:load is code that vLLM does not have"),
        (GPU, {"name": "<in memory module: Gpt>"}, "vLLM loads models of transformers alone"),
        (GPU, {"name": "<in memory: Qwen2ForCausalLM>"}, None),
        (GPU, {}, None),
    ],
)
def test_the_reason_against_it_is_said(machine: HostDevices, words: dict[str, str], reason: str | None) -> None:
    config = Config()
    config.model.name = "Qwen/Qwen2.5-0.5B"
    vars(config.model).update(words)
    assert engine_choice.obstacle_to_vllm(config, machine) == reason


def test_the_machine_is_asked_for_vllm_first_and_for_gpus_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert this_machine() == HostDevices(has_vllm=True, num_gpus=3)
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: None)
    assert this_machine() == HostDevices(has_vllm=False, num_gpus=0)


def test_a_new_run_of_the_command_line_and_of_python_look_at_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("covey.api.settings.this_machine", lambda: GPU)
    assert make_config(None, {"model.name": "Qwen/Qwen2.5-0.5B"}).config.engine.name == "vllm"
    assert make_config(Config(), {"model.name": "Qwen/Qwen2.5-0.5B"}).config.engine.name == "native", "it was made"
    monkeypatch.setattr(job, "this_machine", lambda: GPU)
    monkeypatch.chdir(tmp_path)

    def stop(config: Config, **how: object) -> list[str]:
        raise ValueError(f"engine={config.engine.name} would sample")

    monkeypatch.setattr(job, "check_early", stop)
    for verb, engine in (("train", "vllm"), ("evaluate", "native")):
        with logging_as_it_was():
            assert main([verb, "environment=arithmetic", MODEL]) == 2
        assert f"engine={engine} would sample" in capsys.readouterr().err
