"""The settings of each environment; part of the schema in config.py."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.section import Section


def cache_folder() -> str:
    """Where covey keeps what it can make again: $COVEY_CACHE, else ~/.cache/covey."""
    return os.environ.get("COVEY_CACHE") or str(Path.home() / ".cache" / "covey")


@dataclass
class EnvironmentConfig(Section):
    """What every environment has."""

    name: str = ""
    """Which environment, a key of environments.ENVIRONMENTS."""


@dataclass
class ArithmeticConfig(EnvironmentConfig):
    """Generated sums, with difficulty levels."""

    name: str = "arithmetic"
    levels: list[int] = field(default_factory=lambda: [3])
    """Difficulty levels to draw problems from (environments/arithmetic.py lists them)."""
    num_train: int = 4096
    """Training problems (fewer where a level has not so many)."""
    num_test: int = 512
    """Held-out problems, none of which is in the training set."""
    problem_seed: int = 0
    """Which problems are drawn."""


@dataclass
class Gsm8kConfig(EnvironmentConfig):
    """Grade-school word problems; rows from `data`."""

    name: str = "gsm8k"
    scheme: str = "covey"
    """How an answer is rewarded: covey, values, verl_strict, verl_flexible, torchrl or trl."""
    format_reward: float = 0.1
    """Reward for an answer in the requested form that is wrong (schemes covey and values)."""
    instruction: str | None = None
    """What the system message says; null takes the scheme's own, "" sends none."""


@dataclass
class MathConfig(EnvironmentConfig):
    """Problems whose answer is any mathematics; rows from `data`."""

    name: str = "math"
    scheme: str = "covey"
    """How an answer is rewarded: covey, values, math_verify, trl, verl, verl_dapo or torchrl."""
    format_reward: float = 0.1
    """Reward for a wrong answer in the only box (schemes covey and values)."""
    instruction: str | None = None
    """What the system message says; null takes the scheme's own, "" sends none."""
    problem_column: str = "problem"
    """Column that holds the problem."""
    answer_column: str = "answer"
    """Column that holds the gold answer, in rows that have one."""
    solution_column: str = "solution"
    """Column of worked solutions; the last box is the gold answer of a row without an answer column."""
    timeout: float = 10.0
    """Seconds math-verify may take for one completion before its process is killed; the answer is then wrong."""
    num_workers: int = 2
    """Worker processes that run math-verify."""


@dataclass
class CountdownConfig(EnvironmentConfig):
    """Expressions of given numbers that come to a target: made up, or rows (nums, target) from `data`."""

    name: str = "countdown"
    num_numbers: list[int] = field(default_factory=lambda: [3])
    """How many numbers a made-up problem has, 2 to 6: the difficulties, in equal parts."""
    max_number: int = 20
    """Numbers are drawn from 1 to this."""
    max_target: int = 100
    """Targets are from 1 to this."""
    operators: list[str] = field(default_factory=lambda: ["+", "-", "*", "/"])
    """What problems are made of, `+` among them; answers may use all four."""
    num_train: int = 4096
    """Training problems (fewer where the ranges have not so many)."""
    num_test: int = 512
    """Held-out problems, none of which is in the training set."""
    problem_seed: int = 0
    """Which problems are drawn."""
    uses: str = "exactly"
    """How often each number is used: exactly (once) or at_most (once)."""
    answer_form: str = "tags"
    """Where the expression stands: tags (the last answer tag) or plain (it is the whole completion)."""
    format_reward: float = 0.1
    """Reward for an answer in the requested form that is wrong."""
    instruction: str | None = None
    """What the system message says; null takes the form's own, "" sends none."""


@dataclass
class CodeConfig(EnvironmentConfig):
    """Programs that tests judge in a sandbox: problems made up, or rows from `data`."""

    name: str = "code"
    problem: str = "starters"
    """A family of problems, or starters (the easiest), or all (docs/code.md lists them)."""
    difficulty: int | None = None
    """Only problems of this difficulty; null takes all of `problem`."""
    num_train: int = 4096
    """Training problems (fewer where a family has not so many)."""
    num_test: int = 512
    """Held-out problems, none of which is in the training set."""
    problem_seed: int = 0
    """Which problems are drawn."""
    partial_weight: float = 0.5
    """Reward for passing some of the tests: this times their share. 0 rewards only programs that pass all."""
    second_turn: bool = False
    """Show the policy the test that its program failed, and let it answer once more; that answer is judged."""
    tier: str = "auto"
    """How programs are isolated: auto, namespace, landlock or unsafe_no_isolation."""
    num_slots: int | None = None
    """Programs that run at the same time; null takes one more than there are processors."""
    wall_seconds: float = 5.0
    """Longest time for one test, and for loading a program."""
    total_seconds: float = 20.0
    """Longest time for all tests of a program."""
    cpu_seconds: int = 20
    """Processor time of one program."""
    memory_bytes: int = 536870912
    """Memory of one program, besides what the interpreter takes."""
    output_bytes: int = 8388608
    """Longest answer of a program."""
    cache_size: int = 65536
    """Verdicts kept, so that equal programs run once; 0 keeps none."""
    recheck_rate: float = 0.01
    """Share of programs with full score that run again, on fresh inputs where there are any."""
    remote_url: str | None = None
    """A SandboxFusion-compatible server that runs the programs; null runs them here."""
    remote_margin: float = 10.0
    """Seconds that server may take besides the program's own time."""


@dataclass
class IfevalConfig(EnvironmentConfig):
    """Instructions whose following a program checks: generated prompts, or rows (IFEval's columns) from `data`."""

    name: str = "ifeval"
    scheme: str = "strict_share"
    """How an answer is rewarded: strict, strict_share, loose, loose_share or torchrl."""
    measure_weights: list[float] = field(default_factory=lambda: [0.4, 0.3, 0.2, 0.1])
    """Weights of all strictly, share strictly, all loosely, share loosely (scheme torchrl)."""
    answer_bonus: float = 0.1
    """Added for exactly one answer block (scheme torchrl)."""
    think_bonus: float = 0.05
    """Added for exactly one think block (scheme torchrl)."""
    min_words: int = 3
    """An answer with fewer different words of two letters and more follows nothing (all schemes but torchrl)."""
    instruction: str | None = None
    """What the system message says; null takes the scheme's own, "" sends none."""
    benchmark: str | None = None
    """Rows to evaluate on instead of held-out prompts, such as google/IFEval: a file, a folder or a hub name."""
    style: str = "full"
    """Wording of generated prompts: full, or short (a few words, for the nano policy)."""
    kinds: list[str] = field(default_factory=list)
    """Kinds of instruction that are generated, such as punctuation:no_comma; empty takes all of the style."""
    max_instructions: int = 3
    """Most instructions of a generated prompt."""
    num_train: int = 4096
    """Generated training prompts."""
    num_test: int = 512
    """Generated held-out prompts, none of which is in the training set."""
    problem_seed: int = 0
    """Which prompts are generated."""


@dataclass
class MachinesConfig(EnvironmentConfig):
    """Machines of blocks, worth what they do in a physics simulation (MuJoCo)."""

    name: str = "machines"
    stages: list[str] = field(default_factory=lambda: ["car"])
    """What is asked for, in turn: valid, small_car, budget_car, car, arm, catapult (docs/machines.md)."""
    form: str = "tree"
    """How machines are written: tree (JSON), global (JSON with positions) or compact (characters, for nano)."""
    score: str = "strict"
    """What a machine is worth: strict, paper or repo."""
    transform: str = "none"
    """Of the score, before it is a reward: none, sqrt or log1p. Logged scores are never transformed."""
    file_reward: float = 0.0
    """Added for an answer that is a construction tree."""
    placed_reward: float = 0.0
    """Added for a machine that is valid altogether."""
    max_blocks: int = 48
    """Most blocks of a machine, the root among them, where its stage allows so many."""
    instruction: str | None = None
    """What the system message says; null takes the form's own, "" sends none."""
    num_train: int = 256
    """Training prompts; those of a stage and a block budget are worded alike."""
    num_test: int = 16
    """Held-out prompts."""
    num_demonstrations: int = 1500
    """Machines that a cold start learns from."""
    family_share: float = 0.5
    """Share of rule-based designs among them; the others are grown at random."""
    demonstration_cap: float = 1.0
    """Of each family, only this share is shown, those with the lowest scores: 0.75 leaves the best quarter out."""
    problem_seed: int = 0
    """Which problems and demonstrations are drawn."""
    num_workers: int = 2
    """Processes that simulate."""
    timeout: float = 5.0
    """Seconds one simulation may take on the clock before its worker is killed; the worst machine needs 0.2."""
    cache_size: int = 65536
    """Outcomes kept, so that equal machines are simulated once; 0 keeps none."""


@dataclass
class InfillConfig(EnvironmentConfig):
    """Texts with masked tokens, scored by a learned judge: generated sentences, a text file or rows from `data`."""

    name: str = "infill"
    text_column: str = "text"
    """Column that holds the text, where `data` has rows."""
    window: int = 64
    """Most tokens of a text."""
    masking: str = "random"
    """Which tokens are masked: random (each by itself) or spans."""
    mask_ratios: list[float] = field(default_factory=lambda: [0.3])
    """Shares of tokens masked, in equal parts; several are the stages that curriculum.name=difficulty climbs."""
    span_length: int = 4
    """Tokens of a span."""
    num_train: int = 4096
    """Training prompts."""
    num_test: int = 512
    """Held-out prompts."""
    problem_seed: int = 0
    """Which texts are drawn and what is masked in them."""
    judge: str = "nano-judge"
    """What scores a text: nano-judge (trained by covey), a folder or a hub name of a sequence classifier."""
    judge_floor: float = 0.75
    """Share of held-out texts that a judge must rank above their corrupted versions, or it is refused."""
    judge_device: str = "auto"
    """Where judges run: auto, cpu, cuda, cuda:1, ..."""
    judge_batch_size: int = 64
    """Texts that a judge reads at a time."""
    judge_output: str = "probability"
    """The score: probability (in [0, 1]) or logit."""
    judge_label: int = 0
    """Which output of the judge is the score."""
    judge_num_steps: int = 300
    """Optimiser steps in which nano-judge is trained."""
    judge_pairs: int = 32
    """Real and corrupted texts of such a step."""
    judge_lr: float = 2e-3
    """Peak learning rate of nano-judge; it falls to 0."""
    judge_hidden_size: int = 64
    """Width of nano-judge."""
    judge_num_layers: int = 2
    """Layers of nano-judge."""
    judge_cache_dir: str = field(default_factory=cache_folder)
    """Where trained judges are kept, by content."""
    watch: list[str] = field(default_factory=lambda: ["second_judge"])
    """Logged, never trained on: grammar (exact, of generated sentences), second_judge (trained independently), ngram
    (nats a character by a model of counts)."""


@dataclass
class RewardFunctionsConfig(EnvironmentConfig):
    """Your own rows (`data`) and your own reward functions (`rewards`)."""

    name: str = "reward_functions"
    timeout: float = 30.0
    """Seconds one call of a reward function may take before its worker is killed."""
    num_workers: int = 2
    """Worker processes that run reward functions."""
    start_timeout: float = 120.0
    """Seconds a worker may take to start and to import what the reward functions need."""
    worker_calls: int = 500
    """Calls after which a worker is replaced, so that leaks of threads and descriptors stay bounded."""
    worker_bytes: int = 2147483648
    """Memory above which a worker is replaced after its call (on Linux)."""
    in_process: bool = False
    """Run reward functions in the training process: faster, but one that takes longer than `timeout` ends the run."""
    max_failure_rate: float = 0.05
    """Stop the run when more than this share of the last 1000 rewards failed."""


@dataclass
class CustomConfig(EnvironmentConfig):
    """An environment of your own, a class or function in a module of yours."""

    name: str = "custom"
    factory: str = ""
    """What makes the environment, as module:function; a class is a function too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments, by name."""


@dataclass
class MixtureConfig(EnvironmentConfig):
    """Several environments whose prompts take turns."""

    name: str = "mixture"
    parts: dict[str, Any] = field(default_factory=dict)
    """Settings of each environment by a name for it; `name` in them says which environment, where that is another."""
    weights: dict[str, float] = field(default_factory=dict)
    """How often a part takes its turn in training, relative to the others; one that is not named weighs 1."""
    data: dict[str, Any] = field(default_factory=dict)
    """Rows of a part of its own, by its name, as in `data`; parts that need rows and are not named share `data`."""


ENVIRONMENT_SETTINGS: dict[str, type[EnvironmentConfig]] = {
    "arithmetic": ArithmeticConfig,
    "gsm8k": Gsm8kConfig,
    "math": MathConfig,
    "countdown": CountdownConfig,
    "code": CodeConfig,
    "ifeval": IfevalConfig,
    "machines": MachinesConfig,
    "infill": InfillConfig,
    "reward_functions": RewardFunctionsConfig,
    "custom": CustomConfig,
    "mixture": MixtureConfig,
}
"""The settings of each environment by its name."""

READS_DATA = ("gsm8k", "math", "reward_functions")
"""Environments that need rows."""
