"""`covey translate`: commands, scripts and files of settings of other systems, as covey's command."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.cli.translate import as_lines, read_file, translate, unnamed

TASK = "environment=NAME, or environment=reward_functions rewards=[MODULE:FUNCTION]"

VERL = """\
set -x
train_path=$HOME/data/train.parquet
export WANDB_MODE=offline
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_path" \\
    data.train_batch_size=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.n_gpus_per_node=8 $@
"""


def test_a_script_of_verl_is_one_command(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL)
    found = translate(read_file(script))
    assert list(found.words.values()) == [
        "algorithm.advantage=group_zscore",
        f"data.path={Path.home()}/data/train.parquet",
        "groups_per_step=1024",
        "model.name=Qwen/Qwen2.5-3B-Instruct",
        "algorithm.kl_in=loss",
        "algorithm.kl_coef=0.001",
        "engine=vllm",
        "group_size=5",
    ]
    assert [note.partition("=")[0] for note in found.notes] == ["trainer.n_gpus_per_node"]
    assert as_lines(found)[-1] == f"# still to be named: {TASK}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trl", "grpo", "--beta", "0.1"], [f"still to be named: model.name=NAME; {TASK}; data.path=ROWS"]),
        (["trl", "grpo", "--reward_funcs", "accuracy_reward", "--model_name_or_path", "m"],
         ["still to be named: data.path=ROWS"]),
        (["env.dataset=gsm8k"], []),
        (["model.name=m", "environment=arithmetic"], []),
    ],
)  # fmt: skip
def test_what_the_command_does_not_name_is_still_to_be_named(words: list[str], said: list[str]) -> None:
    assert unnamed(translate(words).words) == said


def test_a_command_of_torchrl_keeps_what_is_called_alike() -> None:
    words = shlex.split(
        "VLLM_USE_V1=0 python grpo-async.py mode=async --config-name grpo_ifeval inference_model.num_devices=2 "
        "optimizer.lr=2e-5 model.name=meta-llama/Llama-2-7b-hf train.total_dialog_turns=6400 "
        "train.dialog_turns_per_batch=64"
    )
    assert list(translate(words).words.values()) == [
        *("source=ray", "max_staleness=2", "recipe=ifeval", "devices.sampler=2"),
        *("optimizer.lr=2e-5", "model.name=meta-llama/Llama-2-7b-hf", "total_rollouts=6400", "groups_per_step=4"),
    ]


def test_fields_of_trl_mean_something_together(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    args = {"max_steps": 20, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
    path.write_text(json.dumps(args | {"beta": 0.04, "bf16": False, "neftune_noise_alpha": 5.0}))
    found = translate(read_file(path))
    assert found.words["groups_per_step"] == "groups_per_step=4"
    assert found.words["num_steps"] == "num_steps=20"
    assert found.words["group_size"] == "group_size=4"
    assert found.words["algorithm.kl_coef"] == "algorithm.kl_coef=0.04"
    assert found.words["algorithm.advantage_options"] == "algorithm.advantage_options={eps:0.0001}"
    assert any("the sampled policy would not be the trained one" in note for note in found.notes)


def test_processes_of_a_launcher_count_in_the_batch() -> None:
    words = "accelerate launch --num_processes 4 grpo.py --per_device_train_batch_size 8 --max_steps 5 --beta 0 --bf16"
    found = translate([*words.split(), "--reward_funcs", "accuracy_reward", "think_format_reward"])
    assert found.words["groups_per_step"] == "groups_per_step=4"
    assert found.words["rewards"] == "rewards=[accuracy,think_format]"
    assert found.notes[0] == "4 processes: torchrun --nproc-per-node=4 -m covey train ..."


def test_the_next_experiment_of_the_code_document_is_one_command() -> None:
    typed = "scripts/validate_grpo_v2.py --problem parentheses --difficulty 7 --steps 20 --generations 4"
    (command,) = as_lines(translate(["uv", "run", "python", *typed.split()]))
    wanted = "recipe=code environment.problem=parentheses environment.difficulty=7 num_steps=20 group_size=4"
    assert command.split(" \\\n  ") == ["covey train", *wanted.split()]


def test_flags_of_the_documents_are_translated_one_by_one() -> None:
    found = translate(["python", "grpo/train_grpo.py", "--group_size=16", "--kl_beta=0.2", "--learning_rate=5e-6"])
    assert as_lines(found) == [
        "covey train \\\n  group_size=16 \\\n  algorithm.kl_coef=0.2 \\\n  optimizer.lr=5e-6",
        f"# still to be named: model.name=NAME; {TASK}; data.path=ROWS",
    ]


def test_the_printed_command_composes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--", "env.dataset=gsm8k", "env.repeats=4", "train.mixed_precision=true"]) == 0
    command = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
    assert command[:2] == ["covey", "train"]
    assert main(["config", "model=nano", "data.path=rows.jsonl", *command[2:]]) == 0
    assert "group_size: 4" in capsys.readouterr().out


def test_every_setting_of_a_toml_file_is_translated_or_said_to_be_unknown(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text('max_steps = 7\n[model]\nname = "Qwen/Qwen2.5-0.5B"\n[trainer.unheard]\nof = 3\n')
    assert as_lines(translate(read_file(tmp_path / "rl.toml"))) == [
        "covey train \\\n  num_steps=7 \\\n  model.name=Qwen/Qwen2.5-0.5B",
        "# max_steps=7 is num_steps=7 here (-1 leaves it to num_train_epochs)",
        "# trainer.unheard.of=3 is no setting here (covey has nothing like it)",
        f"# still to be named: {TASK}; data.path=ROWS",
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--bf16", "maybe", "--beta", "0.1"], "argument --bf16: Truthy value expected: got maybe but expected "),
        (["--model_init_kwargs", "{dtype"], "model_init_kwargs must be a mapping such as {dtype: bfloat16}, got {d"),
    ],
)
def test_a_field_of_trl_with_a_value_that_it_cannot_have_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert main(["translate", "--", "trl", "grpo", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"covey: {line}")
    assert (printed.out, printed.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("-- trl sft --packing", "trl sft does not train by GRPO, which is all that covey does"),
        ("-- trl gpro --beta 0.1", "trl gpro does not train by GRPO, which is all that covey does; did you mean grpo?"),
        (
            "-- accelerate launch --num_processes 2 -m trl.scripts.rloo --beta 0.1",
            "trl.scripts.rloo does not train by GRPO, which is all that covey does; there is algorithm=rloo",
        ),
        ("-- python trl/scripts/dpo.py", "trl/scripts/dpo.py does not train by GRPO, which is all that covey does"),
        (
            "trl grpo --beta 0.04",
            "covey translate takes one file, or a command behind --: covey translate -- trl grpo --beta 0.04",
        ),
        ("", "covey translate takes one file, or a command behind --: covey translate -- env.dataset=gsm8k"),
    ],
)
def test_what_is_no_command_of_grpo_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], typed: str, line: str
) -> None:
    assert main(["translate", *typed.split()]) == 2
    assert capsys.readouterr().err == f"covey: {line}\n"


def test_a_flag_of_trl_is_read_in_either_spelling_and_a_misspelt_one_is_named() -> None:
    typed = "trl grpo --learning-rate 2e-5 --output_dir out --bta 0.1 --push_to_hub --max_steps 3 --num-processes 1"
    found = translate(typed.split())
    assert found.words["optimizer.lr"] == "optimizer.lr=2e-05"
    assert found.words["hydra.run.dir"] == "hydra.run.dir=out"
    assert found.notes == [
        "push_to_hub=True is no setting here (a command pushes nothing; GRPOTrainer of covey.trl does)",
        "bta=0.1: covey has nothing like it; did you mean beta?",
    ]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("run.py", "import trl", "from covey.trl import GRPOTrainer, GRPOConfig"),
        ("run.json", "[1]", "holds no settings"),
        ("run.yaml", "a: [", "run.yaml cannot be read: line 1: "),
        ("run.yaml", "a:\n\tb: 1\n", "run.yaml cannot be read: line 2: indent by blanks, not by a tab"),
        ("run.yaml", "\udcff", "run.yaml cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ("run.sh", "# nothing\n", "holds no command"),
        ("run.sh", "ls here\n", "nothing to translate: no setting and no flag in "),
        ("run.toml", "a = [\n", "cannot be read"),
    ],
)
def test_a_file_with_nothing_to_translate_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, line: str
) -> None:
    (tmp_path / name).write_text(text, errors="surrogateescape")
    assert main(["translate", str(tmp_path / name)]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("accuracy_reward,reasoning_accuracy_reward", "accuracy,reasoning_accuracy"),
        ('["think_format_reward", "my_lib.rewards.short"]', "think_format,my_lib.rewards:short"),
        ("get_soft_overlong_punishment", "{function:soft_overlong,args:{max_length:1280,cache:256}}"),
        ("my_rewards", "my_rewards"),
    ],
)
def test_rewards_of_trls_scripts_get_coveys_names(given: str, expected: str) -> None:
    assert translate(["--reward_funcs", given]).words["rewards"] == f"rewards=[{expected}]"


def test_a_python_script_is_said_not_to_be_read() -> None:
    note = "train.py was not read: a script of TRL runs with `from covey.trl import GRPOTrainer, GRPOConfig` in place"
    for words in ("train.py", "accelerate launch train.py --beta 0.04 --bf16 --num_generations=4"):
        assert [found for found in translate(words.split()).notes if found.startswith(note)] != []


def test_a_file_that_a_command_of_trl_names_is_read_and_flags_go_before_it(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text("model_name_or_path: some/model\nlearning_rate: 1.0e-5\nbeta: 0.1\n")
    found = translate(["trl", "grpo", "--config", str(file), "--beta", "0.04"])
    words = [found.words[name] for name in ("model.name", "optimizer.lr", "algorithm.kl_coef")]
    assert words == ["model.name=some/model", "optimizer.lr=1e-05", "algorithm.kl_coef=0.04"]
    with pytest.raises(ValueError, match=r"missing.yaml is no file"):
        translate(["trl", "grpo", "--config", "missing.yaml"])


@pytest.mark.long
def test_a_translation_prints_nothing_of_the_packages_it_imports() -> None:
    command = [sys.executable, "-m", "covey", "translate", "--", "trl", "grpo", "--beta", "0.04"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    assert "algorithm.kl_coef=0.04" in done.stdout
