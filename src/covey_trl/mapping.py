"""Map GRPOConfig to settings of covey, or refuse it."""

import math
from collections.abc import Mapping
from typing import Any

from covey_trl.config import GRPOConfig, changed_fields
from covey_trl.fields import REFUSED

EPS = 1e-4
"""Constant that TRL adds to a standard deviation."""
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw8bit"),
    "sgd": "sgd",
}
SCHEDULES = {
    **dict.fromkeys(("constant", "constant_with_warmup"), "constant"),
    **dict.fromkeys(("cosine", "cosine_with_min_lr"), "cosine"),
    "linear": "linear",
}
AGGREGATIONS = {
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), "token_mean"),
    **dict.fromkeys(("grpo", "sapo"), "seq_mean_token_mean"),
    "dr_grpo": "seq_mean_token_sum_norm",
    "luspo": "seq_mean_token_sum",
}
"""loss_type -> how token losses become one number. Means over sequences count those without loss tokens, as in TRL."""
ADVANTAGES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "group": ("group_zscore", {"eps": EPS}),
    "batch": ("group_center_batch_std", {"eps": EPS}),
    "none": ("group_center", {}),
}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Fields of sampling -> what None means."""
KEEP_ALL = 10**6
WORDS = {
    "logging_strategy": ("no", "steps"),
    "hub_strategy": ("end", "every_save"),
    "vllm_mode": ("colocate", "server"),
}
"""Fields of one word -> the words that mean something here."""


def refuse_unknown(args: GRPOConfig) -> None:
    """Refuse changed fields that have no counterpart."""
    for name, value in changed_fields(args).items():
        if name in REFUSED and not _is_harmless(name, value):
            raise ValueError(f"GRPOConfig({name}={value!r}) has no counterpart in covey: {REFUSED[name]}")
    for name, known in WORDS.items():
        _chosen(name, _word(getattr(args, name)), dict.fromkeys(known, 0))


def _is_harmless(name: str, value: Any) -> bool:
    return (name, str(value)) in {
        ("gradient_checkpointing_kwargs", "{'use_reentrant': False}"),
        ("pad_to_multiple_of", "None"),
        ("save_only_model", "False"),
    }


def settings_of(args: GRPOConfig, num_rows: int) -> dict[str, Any]:
    """Map a GRPOConfig to settings by dotted name. ValueError without a counterpart."""
    refuse_unknown(args)
    num_batches, groups = batches(args, num_rows)
    num_mini, per_epoch = args.num_mini_batches, max(1, num_rows // groups)  # a batch may hold several epochs
    if groups % num_mini:
        raise ValueError(
            f"{groups} prompts of a batch cannot be shared out to {num_mini} optimiser steps (steps_per_generation / "
            "gradient_accumulation_steps): covey never splits the completions of a prompt"
        )
    tolerances = {name: getattr(args, f"preflight_{name}") for name in ("logprob_tolerance", "gradient_tolerance")}
    return {
        "seed": args.seed,
        "num_steps": num_batches,
        "groups_per_step": groups,
        "group_size": args.num_generations,
        "updates_per_batch": args.num_iterations,
        **({"mini_batch_groups": groups // num_mini} if num_mini > 1 else {}),
        "shuffle": bool(args.shuffle_dataset),
        "timeouts.ranks": float(args.ddp_timeout),
        "parallel.strategy": _strategy(args),
        **_model(args),
        **_sampling(args),
        **_objective(args),
        **_optimizer(args, num_batches),
        **_evaluation(args, num_batches, per_epoch),
        **_output(args, num_batches, per_epoch),
        "preflight.enabled": args.preflight,
        **{f"preflight.{name}": value for name, value in tolerances.items() if value is not None},
    }


def batches(args: GRPOConfig, num_rows: int) -> tuple[int, int]:
    """Count batches, and prompts of each. ValueError for a fraction of a batch."""
    groups = (args.generation_batch_size or 1) // (args.num_generations or 1)
    if args.max_steps > 0:
        steps = args.steps_per_batch
        if args.max_steps % steps:
            raise ValueError(
                f"max_steps={args.max_steps} must be a multiple of the {steps} optimiser steps on a batch "
                "(num_iterations * steps_per_generation / gradient_accumulation_steps)"
            )
        return args.max_steps // steps, groups
    if num_rows < groups:
        raise ValueError(f"train_dataset has {num_rows} rows, and a step takes {groups} prompts; lower the batch size")
    return math.ceil(args.num_train_epochs * (num_rows // groups)), groups


def _strategy(args: GRPOConfig) -> str:
    if not args.fsdp:
        return "ddp"
    if "full_shard" not in str(args.fsdp) or "offload" in str(args.fsdp):
        raise ValueError(f"fsdp={args.fsdp!r} has no counterpart in covey: full_shard is parallel.strategy=fsdp")
    return "fsdp"


def _model(args: GRPOConfig) -> dict[str, Any]:
    return {
        "model.precision": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        "model.gradient_checkpointing": args.gradient_checkpointing,
        "model.chat_template_kwargs": _dictionary(args.chat_template_kwargs),
        **({"model.device": "cpu"} if args.use_cpu else {}),
    }


def _sampling(args: GRPOConfig) -> dict[str, Any]:
    if args.max_completion_length is None:
        raise ValueError("max_completion_length=None has no counterpart in covey: completions have a limit")
    # Keywords of generate that are settings of sampling
    extra = _dictionary(args.generation_kwargs)
    stop = extra.pop("stop_strings", [])
    values = {name: extra.pop(name, getattr(args, name)) for name in NEUTRAL}
    if extra:
        raise ValueError(f"generation_kwargs has no counterpart in covey for {', '.join(extra)}")
    # Completions that TRL samples at a time
    at_a_time = args.per_device_train_batch_size * (args.steps_per_generation or 1)
    return {
        "sampling.max_tokens": args.max_completion_length,
        "micro_batch_tokens": max(16384, args.max_completion_length),
        "sampling.stop": [stop] if isinstance(stop, str) else list(stop),
        **{f"sampling.{name}": NEUTRAL[name] if value is None else value for name, value in values.items()},
        "engine.max_rows": max(at_a_time, args.per_device_eval_batch_size),
        **(_vllm(args) if args.use_vllm else _without_vllm(args)),
    }


def _vllm(args: GRPOConfig) -> dict[str, Any]:
    """Map sampling by vLLM, with TRL's correction of its log-probs."""
    found: dict[str, Any] = {"engine.name": "vllm"}
    # A server, or a share of the trainer's GPU, whose fields TRL reads nowhere else
    if args.vllm_mode == "server":
        address = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        found["engine.url"] = args.vllm_server_base_url or address
    else:
        found["engine.gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
        found |= {"engine.sleep": 2} if args.vllm_enable_sleep_mode else {}
        if args.vllm_max_model_length is not None:
            found["sampling.max_total_tokens"] = args.vllm_max_model_length
    if not args.vllm_importance_sampling_correction:
        return found | {"algorithm.correction": "none"}
    if args.loss_type == "vespo":
        raise ValueError(
            "loss_type='vespo' with use_vllm=True needs vllm_importance_sampling_correction=False: TRL has the "
            "correction in the ratio of vespo, covey beside it"
        )
    level, _, mode = args.vllm_importance_sampling_mode.partition("_")
    clip_max = args.vllm_importance_sampling_clip_max
    return found | {
        "algorithm.correction": mode,
        "algorithm.correction_level": level,
        "algorithm.correction_min": args.vllm_importance_sampling_clip_min,
        "algorithm.correction_max": math.inf if clip_max is None else clip_max,
    }


def _without_vllm(args: GRPOConfig) -> dict[str, Any]:
    """Refuse fields of vLLM without use_vllm."""
    idle = [name for name in changed_fields(args) if name.startswith("vllm_")]
    if idle:
        raise ValueError(f"{idle[0]}={getattr(args, idle[0])!r} needs use_vllm=True")
    return {"algorithm.correction": "none"}


def _objective(args: GRPOConfig) -> dict[str, Any]:
    """Map advantages, loss, reduction and KL penalty, clamped as in TRL."""
    if args.loss_type not in AGGREGATIONS:
        raise ValueError(f"loss_type must be one of {', '.join(AGGREGATIONS)}, got {args.loss_type}")
    splits = args.gradient_accumulation_steps * args.world_size
    if args.loss_type == "bnpo" and splits > 1:
        raise ValueError(
            f"loss_type='bnpo' divides by the tokens of a micro-batch, of which a step has {splits} here, so that the "
            "update depends on the split; loss_type='dapo' divides by those of the step"
        )
    # Means over sequences count empty completions in TRL
    sequence_means = AGGREGATIONS[args.loss_type].startswith("seq_mean")
    return {
        **_advantage(args),
        **_loss(args),
        "algorithm.aggregation": AGGREGATIONS[args.loss_type],
        **({"algorithm.count_empty": True} if sequence_means else {}),
        **_penalties(args),
        "algorithm.mask_truncated": args.mask_truncated_completions,
        "algorithm.high_entropy_fraction": args.top_entropy_quantile,
        "algorithm.off_policy_mask_delta": args.off_policy_mask_threshold,
    }


def _advantage(args: GRPOConfig) -> dict[str, Any]:
    if args.multi_objective_aggregation == "normalize_then_sum":
        return {"algorithm.advantage": "gdpo", "algorithm.advantage_options": {"eps": EPS}}
    if args.multi_objective_aggregation != "sum_then_normalize" or args.scale_rewards not in ADVANTAGES:
        known = f"scale_rewards must be one of {', '.join(ADVANTAGES)}, multi_objective_aggregation sum_then_normalize"
        got = f"got {args.scale_rewards} and {args.multi_objective_aggregation}"
        raise ValueError(f"{known} or normalize_then_sum, {got}")
    name, options = ADVANTAGES[args.scale_rewards]
    return {"algorithm.advantage": name, "algorithm.advantage_options": dict(options)}


def _loss(args: GRPOConfig) -> dict[str, Any]:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    losses: dict[str, tuple[str, dict[str, Any]]] = {
        "cispo": ("cispo", {"ratio_max": high}),
        "sapo": ("sapo", {"tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}),
        "vespo": (
            "vespo",
            {name: getattr(args, f"vespo_{name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
        ),
    }
    clip = {"eps_low": args.epsilon, "eps_high": high}
    clip |= {} if args.delta is None else {"two_sided_delta": args.delta}
    name, options = losses.get(args.loss_type, ("clip", clip))
    levels = {"token": "token", "sequence": "sequence_mean"}
    if args.importance_sampling_level not in levels:
        raise ValueError(f"importance_sampling_level must be token or sequence, got {args.importance_sampling_level}")
    # The ratio of vespo is that of the sequence, whatever the level.
    level = "token" if name == "vespo" else levels[args.importance_sampling_level]
    clamps = {} if name == "vespo" else {"algorithm.log_ratio_clamp": None}
    return {"algorithm.loss": name, "algorithm.loss_options": options, "algorithm.ratio": level, **clamps}


def _penalties(args: GRPOConfig) -> dict[str, Any]:
    if args.top_entropy_quantile < 1 and (args.entropy_coef != 0 or args.use_adaptive_entropy):
        raise ValueError(
            "entropy_coef and use_adaptive_entropy need top_entropy_quantile=1: TRL's bonus is then for the tokens of "
            "highest entropy alone, covey's for all"
        )
    found: dict[str, Any] = {"algorithm.entropy_coef": args.entropy_coef}
    found["algorithm.router_aux_loss_coef"] = args.router_aux_loss_coef
    if args.use_adaptive_entropy:
        found["algorithm.target_entropy"] = args.entropy_target
    if args.beta == 0 and (args.sync_ref_model or args.target_kl is not None):
        name = "sync_ref_model=True" if args.sync_ref_model else f"target_kl={args.target_kl}"
        raise ValueError(f"{name} needs beta > 0: no reference model is held")
    if args.beta == 0:
        return found
    if args.use_bias_correction_kl and args.importance_sampling_level == "sequence":
        raise ValueError(
            "beta > 0 with importance_sampling_level='sequence' needs use_bias_correction_kl=False: covey weighs the "
            "KL by ratios of tokens, for which alone the correction is unbiased"
        )
    found |= {
        "algorithm.kl_coef": args.beta,
        "algorithm.kl_gradient": "is_weighted" if args.use_bias_correction_kl else "naive",
        "algorithm.kl_clamp": None,
        **({} if args.target_kl is None else {"algorithm.target_kl": args.target_kl}),
    }
    if args.sync_ref_model:
        found["algorithm.reference_refresh_every"] = _in_batches(args, args.ref_model_sync_steps)
        found["algorithm.reference_refresh_alpha"] = args.ref_model_mixup_alpha
    return found


def _optimizer(args: GRPOConfig, num_batches: int) -> dict[str, Any]:
    optimizer, schedule = _word(args.optim), _word(args.lr_scheduler_type)
    name, usual = _chosen("optim", optimizer, OPTIMIZERS), _chosen("lr_scheduler_type", schedule, SCHEDULES)
    adam = {"optimizer.betas": [args.adam_beta1, args.adam_beta2], "optimizer.eps": args.adam_epsilon}
    # In transformers the constant schedule has no warm-up
    warmup = 0 if schedule == "constant" else _in_batches(args, args.warmup_steps, num_batches)
    # A run that ends within its warm-up has no schedule after it.
    falls = usual if warmup < num_batches else "constant"
    return {
        "optimizer.name": name,
        "optimizer.lr": args.learning_rate,
        **(adam if name != "sgd" else {}),
        "optimizer.weight_decay": args.weight_decay,
        "optimizer.schedule": falls,
        "optimizer.warmup_steps": warmup,
        **_least_rate(args, schedule, falls),
        "optimizer.max_grad_norm": args.max_grad_norm,
    }


def _least_rate(args: GRPOConfig, schedule: str, falls: str) -> dict[str, Any]:
    keywords = _dictionary(args.lr_scheduler_kwargs)
    if schedule != "cosine_with_min_lr" and keywords:
        raise ValueError(f"lr_scheduler_kwargs={keywords} has no counterpart in covey for {schedule}")
    if schedule != "cosine_with_min_lr" or falls == "constant":
        return {}
    share = keywords.pop("min_lr_rate", None)
    rate = keywords.pop("min_lr", None)
    if keywords or (share is None) == (rate is None):
        raise ValueError("lr_scheduler_kwargs of cosine_with_min_lr must be min_lr_rate or min_lr")
    return {"optimizer.min_lr_ratio": rate / args.learning_rate if share is None else share}


def _evaluation(args: GRPOConfig, num_batches: int, per_epoch: int) -> dict[str, Any]:
    steps = args.eval_steps or args.logging_steps
    every = {"no": 0, "epoch": per_epoch, "steps": _in_batches(args, steps, num_batches)}
    return {
        "evaluation.every": _chosen("eval_strategy", _word(args.eval_strategy), every),
        "evaluation.num_samples": args.num_generations_eval or args.num_generations,
        "evaluation.k": [1],
    }


def _output(args: GRPOConfig, num_batches: int, per_epoch: int) -> dict[str, Any]:
    every = {"no": 0, "epoch": per_epoch, "steps": _in_batches(args, args.save_steps, num_batches)}
    trackers = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    trackers = [name for name in trackers if name != "none"]
    unknown = [name for name in trackers if name not in ("tensorboard", "wandb")]
    if unknown:
        raise ValueError(f"report_to={unknown[0]!r} has no counterpart in covey: there is none, tensorboard and wandb")
    return {
        "output.save_every": _chosen("save_strategy", _word(args.save_strategy), every),
        "output.keep_last": args.save_total_limit or KEEP_ALL,
        "output.trackers": trackers,
        "output.progress": not args.disable_tqdm,
        "output.show_rollouts": (args.num_completions_to_print or 8) if args.log_completions else 0,
    }


def _in_batches(args: GRPOConfig, given: float, num_batches: int = 1) -> int:
    """Convert optimiser steps, or a share of them below 1, to batches."""
    return math.ceil(steps_of(given, num_batches * args.steps_per_batch) / args.steps_per_batch)


def steps_of(given: float, num_steps: int) -> int:
    """Convert a share of all steps, which is below 1, to steps.

    >>> steps_of(10, 200), steps_of(0.1, 200)
    (10, 20)
    """
    return math.ceil(given * num_steps) if 0 < given < 1 else int(given)


def _chosen(field: str, value: str, known: Mapping[str, Any]) -> Any:
    if value not in known:
        raise ValueError(f"{field}={value!r} has no counterpart in covey: there is {', '.join(known)}")
    return known[value]


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def _dictionary(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    assert not isinstance(given, str), "read when the configuration was made"
    return dict(given or {})
