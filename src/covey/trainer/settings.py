"""Settings of the optimiser."""

from dataclasses import dataclass

from covey.algorithm.settings import OVER_THE_BATCH
from covey.policy.settings import IN_DDP
from covey.system.section import Section
from covey.system.setting import Requires, setting

ADAM = Requires("optimizer.name = adamw or adamw8bit", ("optimizer.name",), lambda name: name != "sgd")

PER_GROUP = (
    Requires("updates_per_batch = 1", ("updates_per_batch",), lambda updates: updates == 1),
    Requires(
        "mini_batch_groups = null and mini_batch_rollouts = null",
        ("mini_batch_groups", "mini_batch_rollouts"),
        lambda groups, rollouts: groups is None and rollouts is None,
    ),
    Requires("parallel.strategy = ddp", ("parallel.strategy",), lambda strategy: strategy == "ddp"),
    Requires("model.lora_dropout = 0", ("model.lora_dropout",), lambda share: share == 0),
    Requires(
        "an algorithm.advantage of a group alone", ("algorithm.advantage",), lambda name: name not in OVER_THE_BATCH
    ),
    Requires(
        "algorithm.advantage_options.post_normalize = none",
        ("algorithm.advantage_options",),
        lambda options: options.get("post_normalize", "none") == "none",
    ),
    Requires("algorithm.length_normalizer = null", ("algorithm.length_normalizer",), lambda alpha: alpha is None),
    Requires(
        "a built-in algorithm.aggregation, whose count is known",
        ("algorithm.aggregation", "algorithm.kl_aggregation"),
        lambda *modes: not any(":" in (mode or "") for mode in modes),
    ),
    Requires(
        "an engine that leaves the device to training: engine.name = native or fill, or source = ray",
        ("engine.name", "source"),
        lambda engine, source: engine != "vllm" or source == "ray",
    ),
    Requires("algorithm.selection = null", ("algorithm.selection",), lambda name: name is None),
)
"""Requirements of gradients accumulated group by group; rules of the loss are looked at once it is built."""


@dataclass
class OptimizerConfig(Section):
    """The optimiser and its schedule."""

    name: str = setting(
        "adamw",
        choices=("adamw", "adamw8bit", "sgd"),
        packages={"adamw8bit": ("bitsandbytes", "quantization")},
        needs=IN_DDP.for_value("adamw8bit"),
    )
    """adamw, adamw8bit (bitsandbytes) or sgd."""
    lr: float = setting(1e-6, gt=0)
    """Peak learning rate."""
    betas: list[float] = setting([0.9, 0.999], needs=ADAM)
    """Decay rates of the AdamW moments."""
    eps: float = setting(1e-8, gt=0, needs=ADAM)
    """Added to the AdamW denominator."""
    weight_decay: float = setting(0.0, ge=0)
    """Decoupled weight decay, on weight matrices only."""
    schedule: str = setting(
        "constant",
        choices=("constant", "linear", "cosine"),
        needs=Requires(
            "optimizer.warmup_steps < num_steps",
            ("optimizer.warmup_steps", "num_steps"),
            lambda warmup_steps, num_steps: warmup_steps < num_steps,
            remedy="a run this short takes optimizer.warmup_steps=0",
        ),
    )
    """constant, linear or cosine, over num_steps."""
    warmup_steps: int = setting(0, ge=0)
    """Steps over which the rate rises linearly to lr; the first takes lr / warmup_steps."""
    min_lr_ratio: float = setting(
        0.0,
        ge=0,
        le=1,
        needs=Requires("optimizer.schedule = linear or cosine", ("optimizer.schedule",), lambda one: one != "constant"),
    )
    """Share of lr towards which linear and cosine fall; the step after the last would have it."""
    max_grad_norm: float = setting(1.0, ge=0)
    """Gradients are scaled down to this norm; 0 does not clip."""
    max_nonfinite_steps: int = setting(5, ge=1)
    """Stop once this many steps in a row were skipped for a loss or gradient that is not finite."""
