"""Slips on the command line: each is one line that says what to type, and what can be understood is done."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.cli.command_line import arrange, read_audit, with_whole_numbers
from covey.cli.main import main

from ..support.small import logging_as_it_was


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COVEY_DEBUG", raising=False)
    with logging_as_it_was():
        yield


SLIPS: list[tuple[list[str], str]] = [
    (["--num-steps", "3"], 'no flag "--num-steps"; settings are written num_steps=3; see `covey train --help`'),
    (["--num_steps=3"], 'no flag "--num_steps"; settings are written num_steps=3; see `covey train --help`'),
    (["--recipe", "arithmetic"],
     'no flag "--recipe"; settings are written recipe=arithmetic; see `covey train --help`'),
    (["--optimizer.lr=1"], 'no flag "--optimizer.lr"; settings are written optimizer.lr=1; see `covey train --help`'),
    (["--shuffle"], 'no flag "--shuffle"; settings are written shuffle=...; see `covey train --help`'),
    (["--learning_rate", "1e-6"],
     'no flag "--learning_rate"; did you mean optimizer.lr=1e-6?; see `covey train --help`'),
    (["--use_vllm", "true"], 'no flag "--use_vllm"; did you mean engine=vllm?; see `covey train --help`'),
    (["--confg-name"], 'no flag "--confg-name"; did you mean --config-name?; see `covey train --help`'),
    (["-v"], 'no flag "-v"; see `covey train --help`'),
    (["arithmetic"], '"arithmetic" sets nothing; did you mean recipe=arithmetic?'),
    (["gsm8k_lora", "seed=1"], '"gsm8k_lora" sets nothing; did you mean recipe=gsm8k_lora?'),
    (["num_steps", "=", "3"], "num_steps sets nothing; write num_steps=3 without blanks"),
    (["num_steps", "=3"], "num_steps sets nothing; write num_steps=3 without blanks"),
    (["num_steps=", "3"], "num_steps= is empty; write num_steps=3 without a blank"),
    (["foo"], 'cannot read the override "foo": settings are written name=value, such as recipe=arithmetic'),
    (["{}"], 'cannot read the override "{}": settings are written name=value, such as recipe=arithmetic'),
    (["=3"], "=3 names no setting; settings are written name=value, such as recipe=arithmetic"),
    (["data.path=ü/rows (1).jsonl"],
     "cannot read the override \"data.path=ü/rows (1).jsonl\": quote the value, for the shell and for Hydra: "
     "\"data.path='ü/rows (1).jsonl'\""),
    (["optimizer.lr.x=3"], "optimizer.lr.x=3 sets nothing: optimizer.lr is one value; write optimizer.lr=3"),
    (["+seed.a.b=3"], "seed.a.b=3 sets nothing: seed is one value; write seed=3"),
    (["evaluation.k.x=3"], "evaluation.k.x=3 sets nothing: evaluation.k is a list; write evaluation.k=[...]"),
    (["~algorithm.kl_coef"], "algorithm.kl_coef cannot be deleted; every setting has a value"),
    (["+algorithm.kl_coef=1"], "algorithm.kl_coef is a setting already: write it without +"),
    (["--config"], "--config needs a value"),
    (["--config", "nowhere.yaml"], "--config nowhere.yaml is no file"),
    (["hydra.run.dir="], "hydra.run.dir is empty; name the folder of the run"),
    (["hydra.run.dir=/dev/null"], "hydra.run.dir=/dev/null: the run folder cannot be made (File exists); name another"),
    (["hydra.run.dir=/dev/null/x"],
     "hydra.run.dir=/dev/null/x: the run folder cannot be made (Not a directory); name another"),
    (["hydra.run.dir=/proc/nope"],
     "hydra.run.dir=/proc/nope: the run folder cannot be made (No such file or directory); name "
     "another"),
    (["seed=1,2"], "seed=1,2 holds several values: add --multirun for a run of each; a list is seed=[1,2]"),
    (["evaluation.k=1,4"],
     "evaluation.k=1,4 holds several values: add --multirun for a run of each; a list is "
     "evaluation.k=[1,4]"),
    (["experiment=e1"], "unknown setting experiment"),
    (["--config-dir", "conf", "experiment=e1"],
     "experiment is no group of covey's own; +experiment=NAME adds a choice of a group in "
     "--config-dir"),
    (["--config-dir", "conf", "recipe=forgot"],
     "recipe is no section of settings in recipe/forgot.yaml; begin the file with the line `# "
     "@package _global_`"),
    *((word, "unknown setting " + word[0].partition("=")[0] + "; did you mean hydra.run.dir=FOLDER, which names the "
       "run's folder?")
      for word in (["output.folder=x"], ["output.path=x"], ["folder=x"])),
    (["output_dir=x"], "output_dir=x is hydra.run.dir=x here"),
    (["--output_dir", "x"], 'no flag "--output_dir"; output_dir=x is hydra.run.dir=x here; see `covey train --help`'),
    (["model.name="], "model.name is empty: a directory, a hub name, nano or nano-masked"),
    (["data.path="], "data.path is empty; null leaves it out"),
    (["model.precision=bf16"],
     "model.precision must be one of float32, bfloat16, float16, float64, got bf16; did you mean "
     "bfloat16?"),
    (["optimizer.schedule=constant_with_warmup"],
     "optimizer.schedule must be one of constant, linear, cosine, got constant_with_warmup; did you "
     "mean constant?"),
    (["optimizer.lr=1e10"], "optimizer.lr must be <= 100, got 1e+10"),
    (["optimizer.lr=nan"], "optimizer.lr must be a finite number, got nan"),
    (["optimizer.weight_decay=inf"], "optimizer.weight_decay must be a finite number, got inf"),
    (["optimizer.betas=[0.9,nan]"], "optimizer.betas must be a finite number, got nan"),
    (["algorithm.loss_options.eps_low=nan"], "algorithm.loss_options.eps_low must be a finite number, got nan"),
    (["seed=-1"], "seed must be >= 0, got -1"),
    (["seed=99999999999999999999"], "seed must be <= 9,223,372,036,854,775,807, got 99,999,999,999,999,999,999"),
    (["environment.problem_seed=-1"], "environment.problem_seed must be >= 0, got -1"),
    (["num_steps=1e12"], "num_steps must be <= 1,000,000,000, got 1,000,000,000,000"),
    (["environment.num_train=1e8"], "environment.num_train must be <= 10,000,000, got 100,000,000"),
    (["num_steps=1.5"], "num_steps must be an integer, got 1.5"),
    (["num_steps=${nope}"], "a ${...} cannot be filled in: Interpolation key 'nope' not found"),
    (["num_steps=${num_steps}"], "a ${...} cannot be filled in: Recursive interpolation detected"),
    (["group_size_schedule=[{step:2}]"], "group_size_schedule[0].group_size must have a value"),
    (["group_size_schedule=[4]"], "group_size_schedule[0] must be a mapping, got 4"),
    (["evaluation.k=[0]"], "evaluation.k must be >= 1 each, got [0]"),
    (["orchestrator.rollouts_per_example=8"], "orchestrator.rollouts_per_example=8 is group_size=8 here"),
    (["optimiser.lr=1"], "optimiser.lr=1 is optimizer.lr=1 here"),
    (["--actor_learning_rate", "1e-6"],
     'no flag "--actor_learning_rate"; actor_learning_rate=1e-6 is optimizer.lr=1e-6 here; see `covey train --help`'),
    (["algorithm.eps_low=0.1"], "unknown setting algorithm.eps_low; did you mean algorithm.loss or "
     "algorithm.loss_options.eps_low?"),
    (["algorithm.clip=0.1"],
     "unknown setting algorithm.clip; did you mean algorithm.loss_options.eps_low or algorithm.loss_options.eps_high?"),
    (["algorithm.name=dapo"], "unknown setting algorithm.name; did you mean algorithm=dapo?"),
    (["algorithm.loss_type=dr_grpo"], "unknown setting algorithm.loss_type; did you mean algorithm=dr_grpo?"),
    (["recipe.name=gsm8k"], "unknown setting recipe.name; did you mean recipe=gsm8k?"),
    (["RECIPE=gsm8k"], "unknown setting RECIPE; did you mean recipe?"),
    (["batchsize=4"], "unknown setting batchsize; did you mean groups_per_step?"),
    (["cold_start.batchsize=4"], "unknown setting cold_start.batchsize; did you mean cold_start.batch_size?"),
    (["preflight=false"], "preflight is a section of settings: write preflight.enabled=false"),
    (["recipe==gsm8k"], 'cannot read the override "recipe==gsm8k": a setting has one =: write recipe=gsm8k'),
    (["seed=1 num_steps=3"],
     'cannot read the override "seed=1 num_steps=3": it holds several settings: write each as a word of its own'),
    (["outputs/x"], '"outputs/x" sets nothing; did you mean model.name=outputs/x?'),
    (['algorithm.loss_options={"eps_low":0.1}'],
     'cannot read the override "algorithm.loss_options={"eps_low":0.1}": names within braces have no quotes'),
    (["dataset=org/rows"],
     "dataset=org/rows is no setting here (there is one for gsm8k, ifeval, math, countdown; other rows are "
     "data.path=NAME)"),
    (["teacher_model_name_or_path=x"], "teacher_model_name_or_path=x is algorithm.teacher=x here (of the policy's "
     "tokens; algorithm.reward_weight=0 trains by it alone)"),
    (["distillation.teacher_model.model_path=x"],
     "distillation.teacher_model.model_path=x is algorithm.teacher=x here (of the policy's tokens)"),
    (["teacher.model_name=x"], "unknown setting teacher.model_name; did you mean algorithm.teacher?"),
    (["model_path=x"], "unknown setting model_path; did you mean model.name?"),
    (["distillation.enabled=true"], "distillation.enabled=true is no setting here (algorithm.teacher=MODEL has a "
     "teacher; algorithm.teacher_term, teacher_options and reward_weight say how it teaches)"),
    (["output.name=x"],
     "unknown setting output.name; did you mean hydra.run.dir=FOLDER, which names the run's folder?"),
    (["-c", "run.yaml"], "-c must be one of job, hydra, all, got run.yaml; a file is --config run.yaml"),
    (["--cfg=run.yaml"], "--cfg must be one of job, hydra, all, got run.yaml; a file is --config run.yaml"),
    (["optimizer=null"], 'optimizer has no choice "null"; choices: adamw, adamw8bit, sgd'),
    (["optimizer=3"], 'optimizer has no choice "3"; choices: adamw, adamw8bit, sgd'),
    (["optimizer={lr:1e-4}"],
     'optimizer has no choice "{lr:1e-4}" (settings are written optimizer.NAME=VALUE); choices: adamw, adamw8bit, sgd'),
]  # fmt: skip


@pytest.mark.parametrize(("words", "line"), SLIPS, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_slip_is_one_line_that_says_what_to_type_and_leaves_nothing(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("experiment", "recipe"):
        Path("conf", folder).mkdir(parents=True)
    Path("conf/experiment/e1.yaml").write_text("# @package _global_\nseed: 5\n")
    Path("conf/recipe/forgot.yaml").write_text("num_steps: 3\n")
    assert main(["train", "environment=arithmetic", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"covey: {line}\n"
    assert printed.out == ""
    assert [path.name for path in Path().iterdir()] == ["conf"]


def test_a_working_directory_that_was_deleted_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    home = Path.cwd()
    Path("gone").mkdir()
    os.chdir("gone")
    (home / "gone").rmdir()
    code = main(["train", "recipe=arithmetic"])
    os.chdir(home)
    assert (code, capsys.readouterr().err) == (
        2,
        "covey: the working directory has been deleted; change to another one\n",
    )


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("algorithm=ppo", "; did you mean grpo?"),
        ("algorithm.loss=ppo", "; did you mean clip?"),
        ("algorithm.advantage=grpo", "; did you mean group_zscore?"),
        ("optimizer=adam", "; did you mean adamw?"),
        ("output.trackers=[weights_and_biases]", "; did you mean wandb?"),
    ],
)
def test_what_others_call_a_choice_is_known(word: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", word]) == 2
    assert near in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "arranged"),
    [
        (["recipe=x", "-m", "seed=1,2"], ["-m", "recipe=x", "seed=1,2"]),
        (["a=1", "--config-dir", "conf", "b=2", "-cn=x", "~c"], ["--config-dir", "conf", "-cn=x", "a=1", "b=2", "~c"]),
        (["recipe=x", "num_steps=1e3", "optimizer.lr=1e-3"], ["recipe=x", "num_steps=1000", "optimizer.lr=1e-3"]),
    ],
)  # fmt: skip
def test_flags_may_stand_anywhere(words: list[str], arranged: list[str]) -> None:
    assert arrange("train", words) == arranged


@pytest.mark.parametrize("flag", ["--info", "-i"])
def test_info_takes_no_setting_for_what_it_is_to_show(flag: str) -> None:
    assert arrange("config", [flag, "seed=1"]) == ["--info=all", "seed=1"]


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("output.save_every=1e3", "output.save_every=1000"),
        ("seed=1E2,2e0", "seed=100,2"),
        ("evaluation.k=[1,1e1]", "evaluation.k=[1,10]"),
        ("environment.num_train=1.5e3", "environment.num_train=1500"),
        ("+num_steps=2e+2", "+num_steps=200"),
        ("num_steps=1.55e1", "num_steps=1.55e1"),
        ("num_steps=1e-3", "num_steps=1e-3"),
        ("num_steps=1e99", "num_steps=1e99"),
        ("optimizer.lr=1e3", "optimizer.lr=1e3"),
        ("model.name=runs/1e3", "model.name=runs/1e3"),
        ("recipe=1e3", "recipe=1e3"),
    ],
)
def test_whole_numbers_may_be_written_with_powers_of_ten(word: str, written: str) -> None:
    assert with_whole_numbers(word) == written


def test_what_is_understood_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/e1.yaml").write_text("# @package _global_\nseed: 5\n")
    assert main(["config", "output.save_every=1e3", "+experiment=e1", "--config-dir", "conf", "num_steps=7"]) == 0
    printed = capsys.readouterr().out
    assert "\n  save_every: 1000\n" in printed
    assert printed.startswith("seed: 5\nnum_steps: 7\n")


def test_a_whole_file_of_settings_starts_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "environment=countdown", "environment.max_number=9", "optimizer.lr=0.25"]) == 0
    Path("saved.yaml").write_text(capsys.readouterr().out)
    typed = ["seed=3", "environment.max_target=50", "algorithm=dr_grpo", "algorithm.kl_coef=0.5"]
    assert main(["config", "--config", "saved.yaml", *typed]) == 0
    printed = capsys.readouterr().out
    for line in ("seed: 3", "  name: countdown", "  max_number: 9", "  max_target: 50", "  lr: 0.25", "  kl_coef: 0.5"):
        assert f"\n{line}\n" in f"\n{printed}"
    assert "  aggregation: seq_sum_norm\n" in printed or "dr_grpo" not in printed
    assert main(["config", "--config", "saved.yaml", "environment=arithmetic"]) == 0
    assert "  levels:" in capsys.readouterr().out
    for words, line in (
        (["recipe=gsm8k"], '"recipe=gsm8k" cannot override settings of saved.yaml, which has every setting'),
        (["sed=3"], "unknown setting sed; did you mean seed?"),
        (
            ["environment.levels=[1]"],
            "the chosen environment has no setting environment.levels; these have: arithmetic",
        ),
        (["group_size=1"], "group_size must be >= 2, got 1"),
        (["resume=saved"], "resume=saved needs no --config"),
    ):
        assert main(["train", "--config", "saved.yaml", *words]) == 2
        assert capsys.readouterr().err == f"covey: {line}\n"


def test_prompts_are_counted_for_covey_config_though_closing_their_environment_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("closing_fails.py").write_text(
        "from covey import Environment, Prompt, Reward\n"
        "class Mine(Environment):\n"
        "    def prompts(self, split): return [Prompt(str(n), 'mine', 'a?', {}) for n in range(64)]\n"
        "    def score(self, prompt, completion): return Reward(0.0)\n"
        "    def close(self): raise OSError('gone')\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    words = ["environment=custom", "environment.factory=closing_fails:Mine", "groups_per_step=32", "num_epochs=3"]
    assert main(["config", *words]) == 0
    assert "\nnum_steps: 6\n" in capsys.readouterr().out


def test_a_fault_in_prompts_is_one_line_of_covey_config_as_of_other_verbs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("no_prompts.py").write_text(
        "from covey import Environment, Reward\n"
        "class Mine(Environment):\n"
        "    def prompts(self, split): raise KeyError('nope')\n"
        "    def score(self, prompt, completion): return Reward(0.0)\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert main(["config", "environment=custom", "environment.factory=no_prompts:Mine", "num_epochs=3"]) == 0
    told = "num_epochs=3 is counted when the run begins, here num_steps=100"
    assert capsys.readouterr().err == f"{told}: Mine.prompts raised KeyError: 'nope' (no_prompts.py:3)\n"


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_the_mode_may_be_that_of_several_jobs(plus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", f"{plus}hydra.mode=MULTIRUN", "seed=1,2"]) == 0
    assert capsys.readouterr().out.count("\nnum_steps: 100\n") == 2


def run_covey(**environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "covey", "--version"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=os.environ | environment
    )


def test_ctrl_c_while_the_command_is_imported_is_one_line() -> None:
    Path("textwrap.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background, as below
    try:
        done = run_covey(PYTHONPATH=f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "covey: interrupted\n")


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    Path("textwrap.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n" + RE_EXPORT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell leaves it to what it starts in the background
    try:
        done = run_covey(PYTHONPATH=f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout) == (0, "covey 0.1.0\n")


RE_EXPORT = "def dedent(text): return text\ndef fill(text, *a, **k): return text\n"
"""Enough of the module in whose place the file stands."""


def test_an_audit_takes_a_function_and_rows_and_leaves_flags_their_values() -> None:
    assert read_audit(["my:f", "rows.jsonl", "seed=1"]) == [
        "environment=reward_functions",
        "rewards=[my:f]",
        "data.path=rows.jsonl",
        "seed=1",
    ]
    assert read_audit(["--config", "run/config.yaml", "seed=1"]) == ["--config", "run/config.yaml", "seed=1"]
    with pytest.raises(ValueError, match="takes a reward function and a file of rows, got a b c"):
        read_audit(["a", "b", "c"])
