"""Refuse arguments and overrides of a trainer that have no counterpart."""

from typing import Any

from transformers import Trainer

from covey_trl.config import GRPOConfig


def check_arguments(args: GRPOConfig, rollout_func: Any, optimizers: tuple[Any, Any], ref_model: Any) -> None:
    """Raise ValueError for arguments without a counterpart or without effect."""
    absent = "has no counterpart in covey yet"
    if rollout_func:
        raise ValueError(f"rollout_func {absent}: covey samples; an environment of your own scores and replies")
    if any(one is not None for one in optimizers):
        raise ValueError(f"optimizers {absent}: optim and lr_scheduler_type of GRPOConfig name one")
    if ref_model is not None and not args.beta:
        raise ValueError("ref_model needs beta > 0: nothing is compared with a reference otherwise")


def quantised_settings(model: Any, given: Any, keywords: dict[str, Any], peft_config: Any) -> dict[str, Any]:
    """Derive the settings of 4- or 8-bit weights under adapters.

    `keywords` for loading lose what asks for them. ValueError for another quantisation, or without plain adapters.
    """
    given = keywords.pop("quantization_config", None) or given
    of_given = vars(given) if hasattr(given, "__dict__") else {}
    if given is not None and not any(of_given.get(f"_{name}") for name in BITS):
        raise ValueError(f"quantization_config must be of BitsAndBytesConfig in 4 or 8 bits, got {given!r:.80}")
    bits = {name: keywords.pop(name, None) or bool(of_given.get(f"_{name}")) for name in BITS}
    if not any(bits.values()):
        return {}
    if not isinstance(model, str):
        raise ValueError("weights in 4 or 8 bits need a model by name, got one in memory")
    fp4 = given is not None and bits["load_in_4bit"]
    if fp4 and (given.bnb_4bit_quant_type, given.bnb_4bit_use_double_quant) != ("nf4", True):
        raise ValueError("4 bits are nf4, quantised twice: bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True")
    if peft_config is None:
        raise ValueError("weights in 4 or 8 bits need a peft_config: adapters are trained, the weights are not")
    plain = type(peft_config)(**{name: vars(peft_config)[name] for name in ADAPTERS})
    others = [name for name, value in vars(peft_config).items() if value != vars(plain)[name] and name not in NOTED]
    if others:
        raise ValueError(f"under 4 or 8 bits peft_config may set {', '.join(ADAPTERS)}, got {others[0]}")
    targets = peft_config.target_modules or "all-linear"
    return {
        **{f"model.{name}": True for name, is_set in bits.items() if is_set},
        "model.lora_rank": peft_config.r,
        "model.lora_alpha": float(peft_config.lora_alpha),
        "model.lora_dropout": peft_config.lora_dropout,
        "model.lora_targets": [targets] if isinstance(targets, str) else sorted(targets),
    }


BITS = ("load_in_4bit", "load_in_8bit")
ADAPTERS = ("r", "lora_alpha", "lora_dropout", "target_modules")
NOTED = ("task_type", "base_model_name_or_path", "revision", "peft_version", "inference_mode")
"""Fields of a peft_config that peft itself fills in, at its first use."""


def check_kinds(model: Any, args: Any, processing_class: Any, **lists: Any) -> None:
    """Raise ValueError for an argument of another type."""
    if not isinstance(model, str) and not hasattr(model, "config"):
        raise ValueError(f"model must be a name, a folder or a model, got {model!r:.80}")
    if not isinstance(args, GRPOConfig | None):
        raise ValueError(f"args must be a GRPOConfig of covey.trl, got a {type(args).__name__}")
    if isinstance(processing_class, str) or not (processing_class is None or callable(processing_class)):
        raise ValueError(f"processing_class must be a tokenizer, got {processing_class!r:.80}")
    for name, value in lists.items():
        if not isinstance(value, list | tuple | None):
            raise ValueError(f"{name} must be a list, got {value!r:.80}")


def check_overrides(made: type, base: type) -> None:
    """Raise ValueError for an overridden method that covey never calls."""
    own = {name for cls in made.__mro__ if cls is not base for name in vars(cls)} - {*vars(base)}
    unread = sorted(name for name in own if name in OF_TRL or (hasattr(Trainer, name) and not hasattr(object, name)))
    if unread:
        raise ValueError(
            f"{made.__name__}.{unread[0]} would never be called: covey has a loop of its own; a loss, an advantage or "
            "a loop of yours goes to covey.train and covey.build"
        )


OF_TRL = (
    *("_calculate_rewards", "_compute_loss", "_generate", "_generate_and_score_completions", "_generate_single_turn"),
    *("_get_per_token_logps_and_entropies", "_tool_call_loop"),
)
"""Methods of TRL's trainer, besides those of transformers', that scripts override."""
