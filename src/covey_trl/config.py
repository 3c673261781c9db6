"""GRPOConfig: the fields of TRL 1.16 with its defaults."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import signature
from os import PathLike
from typing import Any, TypeVar

from transformers import TrainingArguments

from covey.system import ranks
from covey.system.lookup import near
from covey.system.section import convert
from covey_trl.fields import GONE

DICTIONARIES = ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "lr_scheduler_kwargs")
"""Fields that a command line gives as JSON."""
KINDS: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(DICTIONARIES, (Mapping, "a dict, or one in JSON")),
    "reward_weights": (list | tuple, "a list"),
    "report_to": (str | list | tuple, "a name or a list of names"),
    "output_dir": (str | PathLike, "a path"),
}
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations")
Made = TypeVar("Made")


def explaining(made: type[Made]) -> type[Made]:
    """Add remedies to TypeErrors about unknown fields or arguments."""
    init = made.__init__
    known = [*signature(init).parameters][1:]
    kind = "field" if is_dataclass(made) else "argument"

    @wraps(init)
    def explain_unknown(self: Made, *args: Any, **given: Any) -> None:
        unknown = [name for name in given if name not in known]
        said = [f"{name}{f': {GONE[name]}' if name in GONE else near(name, known)}" for name in unknown]
        if said:
            raise TypeError(f"{made.__name__} has no {kind} {'; no '.join(said)}")
        init(self, *args, **given)

    made.__init__ = explain_unknown  # type: ignore[assignment]
    return made


@explaining
@dataclass
class GRPOConfig(TrainingArguments):
    """Arguments of a TRL script, each obeyed or refused by name.

    Those of transformers' TrainingArguments are inherited; HfArgumentParser reads all of them.
    """

    learning_rate: float = 1e-06
    bf16: bool | None = None  # type: ignore[assignment] # None is TRL's default
    gradient_checkpointing: bool = True
    logging_steps: float = 10
    remove_unused_columns: bool | None = False  # type: ignore[assignment] # as in TRL
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False
    num_generations: int | None = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool | None = True
    pad_to_multiple_of: int | str | None = "auto"
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0  # None, as in older versions, is 0
    min_p: float | None = None
    generation_kwargs: dict | str | None = None
    chat_template_kwargs: dict | str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    loss_type: str = "dapo"
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    log_completions_hub_repo: str | None = None
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict | str | None = None
    use_transformers_paged: bool = False
    vllm_importance_sampling_cap: float | None = None
    target_kl: float | None = None  # this one and those below are covey's own
    preflight: bool = True
    preflight_logprob_tolerance: float | None = None
    preflight_gradient_tolerance: float | None = None

    def __post_init__(self) -> None:
        """Derive TRL's dependent fields, without the device setup of transformers."""
        for name in DICTIONARIES:
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, _from_json(name, value))
        self.max_grad_norm = 0.0 if self.max_grad_norm is None else self.max_grad_norm  # which clips nothing
        self._check_kinds()
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        self.scale_rewards = {"true": "group", "false": "none"}.get(str(self.scale_rewards).lower(), self.scale_rewards)
        self._derive_batches()

    @property
    def world_size(self) -> int:
        return ranks.world_size()

    @property
    def steps_per_batch(self) -> int:
        """Optimiser steps on one batch of completions."""
        return self.num_iterations * self.num_mini_batches

    @property
    def num_mini_batches(self) -> int:
        """Optimiser steps of one pass over a batch. ValueError for a fraction."""
        steps, accumulated = self.steps_per_generation or 1, self.gradient_accumulation_steps
        if steps % accumulated:
            raise ValueError(
                f"steps_per_generation={steps} must be a multiple of gradient_accumulation_steps={accumulated}: covey "
                "makes whole optimiser steps of what is sampled at once"
            )
        return steps // accumulated

    def _check_kinds(self) -> None:
        """Raise ValueError for values of another type."""
        for name, kind in NUMBERS.items():
            convert(getattr(self, name), kind, name)
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name, (kind, said) in KINDS.items():
            if not isinstance(getattr(self, name), kind | None):
                raise ValueError(f"{name} must be {said}, got {getattr(self, name)!r:.80}")
        for name in ("logging", "save"):
            every = getattr(self, f"{name}_steps")
            if every <= 0 and str(getattr(self, f"{name}_strategy")) == "steps":
                raise ValueError(f"{name}_steps must be > 0, got {every}; {name}_strategy='no' leaves it out")
        if self.fp16 and self.bf16:
            raise ValueError("fp16=True and bf16=True exclude each other: give one")

    def _derive_batches(self) -> None:
        """Derive generation_batch_size or steps_per_generation. ValueError for a misfit."""
        per_step = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError("generation_batch_size and steps_per_generation say the same: give one of both")
        if self.generation_batch_size is None:
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = per_step * self.steps_per_generation
        # Batches hold whole micro-batches and whole groups
        if self.generation_batch_size % per_step:
            raise ValueError(f"generation_batch_size={self.generation_batch_size} must be a multiple of {per_step}")
        self.steps_per_generation = self.generation_batch_size // per_step
        num_generations = self.num_generations or 0
        if num_generations < 2:
            raise ValueError(f"num_generations must be >= 2, got {num_generations}")
        if self.generation_batch_size % num_generations:
            raise ValueError(
                f"generation_batch_size={self.generation_batch_size} must be a multiple of "
                f"num_generations={num_generations}: groups are never split"
            )


NUMBERS: Mapping[str, Any] = {
    one.name: one.type for one in fields(GRPOConfig) for kind in (int, float, bool) if one.type in (kind, kind | None)
}
"""Fields of numbers and switches, and their kinds, which HfArgumentParser changes in the class."""


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} must be a dict, or one in JSON, got {text!r:.80}") from error


def default_of(name: str) -> Any:
    """Look up the default of a field, before anything is derived."""
    found = next(one for one in fields(GRPOConfig) if one.name == name)
    return found.default if found.default_factory is MISSING else found.default_factory()


def changed_fields(args: GRPOConfig) -> Mapping[str, Any]:
    """Collect the fields that differ from their default."""
    values = {one.name: getattr(args, one.name) for one in fields(args)}
    return {name: value for name, value in values.items() if value != default_of(name)}
