"""The settings: dataclasses are the schema, the YAML under conf/ only chooses, `validate` holds every cross-field rule.

Unknown keys fail. No key appears twice, no default depends on another field; derived numbers are computed and printed.
Components take plain parameters, not these objects (`train` and the builders in `build.py` are the exceptions).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from covey.algorithm_config import AlgorithmConfig
from covey.curriculum_config import CurriculumConfig, GroupSizeStep
from covey.environment_config import READS_DATA, ArithmeticConfig, EnvironmentConfig, MixtureConfig, cache_folder
from covey.section import Section, check_section


@dataclass
class ModelConfig(Section):
    """The policy."""

    name: str = "nano"
    """"nano" or "nano-masked" (built from nothing), a directory, or a hub name of a causal or a masked LM."""
    kind: str = "causal"
    """What the policy does: causal (continues a prompt) or masked (fills in the masked tokens of its input)."""
    revision: str | None = None
    """Hub revision; null takes the default branch."""
    precision: str = "float32"
    """What the forward pass computes in: float32, bfloat16, float16 or float64. Weights train in float32 at least."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values that the chat template reads, such as {enable_thinking: false}. The saved policy has them as defaults."""
    load_in_4bit: bool = False
    """Hold frozen base weights in 4 bits (bitsandbytes NF4); needs lora_rank > 0."""
    lora_rank: int = 0
    """Rank of the LoRA adapters; 0 trains all weights."""
    lora_alpha: float = 32.0
    """LoRA scale numerator: updates are multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout before the adapters during training; above 0 the trained policy is not exactly the sampled one."""
    lora_targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Module names that get an adapter; ["all-linear"] means every linear layer but the output head."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    activation_offload: bool = False
    """Keep activations of the training pass in the host's memory: less GPU memory, bound by the bus."""
    attention: str = "auto"
    """How packed rollouts attend in training: blocks (batched by length), compiled (C, on a CPU), flex
    (FlexAttention, needs a GPU), or auto (compiled where it can be, else blocks)."""
    linear: str = "auto"
    """Library of float32 linear layers on a CPU: onednn, torch, or auto (torch on Intel and for small layers)."""
    kernels: str = "auto"
    """Norms, gates and rotary positions: compiled (C, float32 on a CPU), torch, or auto (compiled where it can be)."""
    device: str = "auto"
    """auto (CUDA when there), cpu, cuda, cuda:1, ..."""
    nano_architecture: str = "qwen2"
    """Architecture of the nano policy: qwen2, qwen3, llama or mistral; of nano-masked modernbert, bert or roberta."""
    nano_hidden_size: int = 128
    """Width of the nano policy."""
    nano_num_layers: int = 4
    """Layers of the nano policy."""
    nano_num_heads: int = 4
    """Attention heads of the nano policy."""


@dataclass
class DataConfig(Section):
    """Rows of a data set, for environments that read one."""

    path: str | None = None
    """A file (JSON lines, JSON, CSV, TSV, Parquet, Arrow), a folder of them, a pattern such as shards/*.parquet, what
    save_to_disk wrote, a hub name, or module:function."""
    subset: str | None = None
    """Configuration name of a hub data set, or of a folder with its data card."""
    train_split: str = "train"
    """Split to train on."""
    test_split: str = "test"
    """Split to evaluate on; where the data has none, `test_fraction` of the rows is held out."""
    test_fraction: float = 0.1
    """Share of rows held out when there is no test split."""
    prompt_column: str = "prompt"
    """Column that holds the prompt (text or messages) for environment=reward_functions."""
    answer_column: str | None = None
    """Column that the assistant's message at the end of a conversation is moved to; null refuses such rows."""
    prefill: bool = False
    """Have the policy go on from the assistant's message at the end of a conversation."""
    max_rows: int | None = None
    """Take at most this many rows of each split."""
    shuffle_rows: bool = True
    """Take those `max_rows` at random, the same ones every time; false takes the first."""
    bad_rows: str = "error"
    """What a broken line does: error (names file and line) or skip (counted)."""


@dataclass
class EngineConfig(Section):
    """How tokens are sampled."""

    name: str = "native"
    """native or fill (in process, on the trainer's weights; fill is for model.kind=masked) or fake (scripted)."""
    cache_bytes: int = 1073741824
    """Bytes of memory for cached keys and values; admission of prompts waits for room."""
    max_rows: int = 512
    """Most completions sampled at the same time."""
    kernels: str = "auto"
    """What decodes: compiled (C; float32 or bfloat16 on a CPU), torch, or auto (compiled where it can be)."""


@dataclass
class SamplingConfig(Section):
    """The distribution that rollouts are drawn from; the trainer scores under the same one."""

    temperature: float = 1.0
    """Divides the logits; must be > 0 for training."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Nucleus mass; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    max_tokens: int = 256
    """Longest completion, in tokens."""
    stop: list[str] = field(default_factory=list)
    """Stop strings, besides the model's own stop tokens."""
    num_passes: int = 1
    """Passes in which a masked policy fills an input, the most certain tokens first; 1 fills all at once."""
    likelihood: str = "trajectory"
    """Log-probs of a fill in several passes: trajectory (of each pass, exact) or one_step (all from the first, biased;
    diffu-GRPO, arXiv 2504.12216)."""


@dataclass
class OptimizerConfig(Section):
    """The optimiser and its schedule."""

    name: str = "adamw"
    """adamw, adamw8bit (bitsandbytes) or sgd."""
    lr: float = 1e-6
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the AdamW moments."""
    eps: float = 1e-8
    """Added to the AdamW denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on weight matrices only."""
    schedule: str = "constant"
    """constant, linear or cosine, over num_steps."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly to lr; the first takes lr / warmup_steps."""
    min_lr_ratio: float = 0.0
    """Share of lr towards which linear and cosine fall; the step after the last would have it."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 does not clip."""
    max_nonfinite_steps: int = 5
    """Stop after so many steps in a row were skipped for a loss or gradient that is not finite."""


@dataclass
class DistributionConfig(Section):
    """Training on several processes, which torchrun or accelerate launch starts."""

    strategy: str = "ddp"
    """ddp (every rank holds all weights) or fsdp (weights, gradients and optimiser state are shared out: FSDP2)."""


@dataclass
class ColdStartConfig(Section):
    """Supervised warm-up on demonstrations before GRPO."""

    enabled: bool = False
    """Warm the policy up before GRPO (environments that demonstrate)."""
    num_steps: int = 200
    """Most optimiser steps."""
    target_accuracy: float | None = None
    """Stop as soon as greedy accuracy on held-out prompts reaches this; null runs all steps."""
    check_every: int = 10
    """Steps between two looks at the accuracy."""
    num_check_prompts: int = 256
    """Held-out prompts looked at."""
    batch_size: int = 128
    """Demonstrations a step."""
    lr: float = 1e-3
    """Learning rate, constant after a short rise."""
    warmup_steps: int = 10
    """Steps over which the rate rises linearly from 0."""
    cache_dir: str = field(default_factory=cache_folder)
    """Where warmed policies are kept, by content; a second run takes it from there."""


@dataclass
class EvaluationConfig(Section):
    """Measuring on the held-out split: before, during and after."""

    every: int = 0
    """Steps between evaluations during the run; 0 evaluates only before and after."""
    num_prompts: int = 128
    """Held-out prompts, the same every time."""
    num_samples: int = 4
    """Completions a prompt for pass@k and the mean reward."""
    k: list[int] = field(default_factory=lambda: [1, 4])
    """The k of pass@k; each must be <= num_samples."""
    correct_above: float = 1.0
    """A completion with a reward of at least this counts as correct."""
    confidence: float = 0.95
    """Level of the confidence intervals."""


@dataclass
class OutputConfig(Section):
    """What a run leaves behind, besides its config, summary and log."""

    save_every: int = 100
    """Steps between checkpoints; 0 saves only at the end, and when the run is stopped."""
    keep_last: int = 3
    """How many of the last checkpoints are kept."""
    keep_best: bool = True
    """Keep also the checkpoint of the best evaluation."""
    rollouts_per_step: int = 8
    """Rollouts written to rollouts.jsonl each step."""
    answers_per_evaluation: int = 256
    """Answers written to evaluations.jsonl at each evaluation, greedy ones first."""
    show_rollouts: int = 0
    """Rollouts of each step shown in the terminal, from the highest reward to the lowest."""
    max_rollout_rows: int = 20000
    """Most rows of rollouts.jsonl, and of evaluations.jsonl."""
    trackers: list[str] = field(default_factory=list)
    """Besides metrics.jsonl: tensorboard, wandb."""
    wandb_project: str = "covey"
    """W&B project; WANDB_MODE=offline keeps it local."""
    progress: bool = True
    """Show progress in the terminal."""
    on_write_error: str = "stop"
    """What a full or vanished disk does: stop (to be resumed) or continue (rows and saves are tried again later)."""
    grace_seconds: float = 120.0
    """Longest time from Ctrl-C or SIGTERM to the exit; a save that takes longer is given up."""


@dataclass
class PreflightConfig(Section):
    """What is measured on your own model and settings before the first step of a new run, and by `covey check`."""

    enabled: bool = True
    """Measure, and refuse a run that is outside the tolerances."""
    num_prompts: int = 8
    """Prompts looked at, the first of the run."""
    max_tokens: int = 64
    """Longest completion looked at, in tokens, where sampling.max_tokens is not shorter."""
    logprob_tolerance: float | None = None
    """Most nats by which engine and trainer may differ on a token; null goes by the precision (1e-4 in float32)."""
    gradient_tolerance: float | None = None
    """Most relative error of a gradient between layouts; null goes by the precision (1e-5 in float32)."""


@dataclass
class DeadlinesConfig(Section):
    """Seconds a run may wait for something that gives no sign of progress, before it ends with a line that names it."""

    loading: float = 3600.0
    """For the data, the model or a checkpoint to be read."""
    cold_start: float = 3600.0
    """From one look at a cold start's accuracy to the next."""
    sampling: float = 900.0
    """For the engine's next tokens."""
    scoring: float = 900.0
    """For the environment's next judgement."""
    update: float = 1800.0
    """For the next micro-batch or phase of an optimiser step."""
    saving: float = 1800.0
    """For a checkpoint or the logs to be written."""
    ranks: float = 1800.0
    """For the other ranks, where several processes train together."""
    tracker: float = 60.0
    """For TensorBoard or W&B; the run then goes on without it."""


@dataclass
class Config(Section):
    """One run."""

    seed: int = 0
    """Everything random follows from it."""
    num_steps: int = 100
    """Optimiser phases: batches of groups taken."""
    groups_per_step: int = 32
    """Prompts of one step."""
    group_size: int = 8
    """Completions of one prompt (G)."""
    group_size_schedule: list[GroupSizeStep] = field(default_factory=list)
    """Other group sizes later on: [{step: 100, group_size: 4}] takes 4 once 100 steps are finished."""
    updates_per_batch: int = 1
    """Optimiser steps on each batch; above 1 the ratio is against the log-probs before the first."""
    micro_batch_tokens: int = 16384
    """Most packed tokens of one forward/backward pass. Changes memory and speed, never the update."""
    packing: str = "shared"
    """How rollouts are laid out: shared (a prompt once for its whole group), packed, or padded."""
    logprob_chunk: int = 4096
    """Loss tokens whose logits are held at once; 0 holds all."""
    max_staleness: int = 0
    """Most versions between the start of a group and its training; 0 is synchronous."""
    source: str = "local"
    """Where groups come from: local (this process)."""
    shuffle: bool = True
    """Take prompts in an order drawn from the seed, a new one each pass."""
    resume: str | None = None
    """Go on with a run: its folder, or "latest". Its settings are taken from there."""
    resume_changes: list[str] = field(default_factory=list)
    """Settings that may differ from those of the resumed run, by name; it is then no longer bit for bit the same."""
    trust_run: bool = False
    """Import what a run or a file of settings names that you did not make here, and follow its links."""
    rewards: list[Any] = field(default_factory=list)
    """Reward functions (environment=reward_functions): ready-made names, module:function, or {function, args}."""
    reward_weights: list[float] = field(default_factory=list)
    """One weight for each reward function; empty weighs all 1."""
    model: ModelConfig = field(default_factory=ModelConfig)
    environment: Any = field(default_factory=ArithmeticConfig)
    """One of the environments' own settings."""
    data: DataConfig = field(default_factory=DataConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    distribution: DistributionConfig = field(default_factory=DistributionConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)


def part_configs(config: Config) -> dict[str, Config]:
    """The configuration of each part of environment=mixture, as if it were alone, by its name."""
    mixture = config.environment
    assert isinstance(mixture, MixtureConfig), "only a mixture has parts"
    shared = {name: config.data if part.name in READS_DATA else DataConfig() for name, part in mixture.parts.items()}
    rows = shared | mixture.data
    return {name: replace(config, environment=part, data=rows[name]) for name, part in mixture.parts.items()}


def validate(config: Config, meanwhile: Callable[[Config], None] | None = None) -> None:
    """Check names, types and every rule between settings. The rules are `covey.rules.RULES`.

    `meanwhile` is called after the plain ones, before those that import torch. ValueError with one line that names the
    settings to mend.
    """
    from covey.rules import RULES, check_functions  # the rules are about the classes above

    check_section(config)
    if not isinstance(config.environment, EnvironmentConfig):
        raise ValueError(f"environment must be settings, such as ArithmeticConfig(), got {config.environment!r:.60}")
    for rule in RULES:
        rule(config)
    if meanwhile is not None:
        meanwhile(config)
    check_functions(config)
