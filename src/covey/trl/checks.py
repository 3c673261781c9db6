"""Arguments and subclasses of a trainer that have no counterpart, refused by name."""

from typing import Any

from transformers import Trainer

from covey.trl.config import GRPOConfig


def check_arguments(
    args: GRPOConfig, rollout_func: Any, optimizers: tuple[Any, Any], quantization_config: Any, ref_model: Any
) -> None:
    """Raise ValueError for an argument that has no counterpart, or that nothing would read."""
    refused = {
        "rollout_func": (rollout_func, "covey samples; an environment of your own scores and replies"),
        "optimizers": (
            any(one is not None for one in optimizers),
            "optim and lr_scheduler_type of GRPOConfig name one",
        ),
        "quantization_config": (quantization_config, "model.load_in_4bit of covey.train loads in 4 bits"),
    }
    for name, (value, reason) in refused.items():
        if value:
            raise ValueError(f"{name} has no counterpart in covey yet: {reason}")
    if ref_model is not None and not args.beta:
        raise ValueError("ref_model needs beta > 0: nothing is compared with a reference otherwise")


def check_kinds(model: Any, args: Any, processing_class: Any, **lists: Any) -> None:
    """Raise ValueError for an argument of another kind. `lists` are those that hold several."""
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
    """Raise ValueError for a class that overrides a method of TRL's trainer which covey's, its base, never calls."""
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
