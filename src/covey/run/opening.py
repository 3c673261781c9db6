"""What a run says of itself before its first step: the policy, the prompts, how much of them it will see."""

from covey.config.schema import Config
from covey.policy.policy import Policy
from covey.rollouts.source import PromptStream
from covey.run.build import Run
from covey.system.text.format import count, percent


def opening(run: Run, config: Config) -> str:
    """Say in one line what is trained on what, and for how long.

    >>> opening(run, config)
    'nano: 1.38M parameters, all trained; 22 prompts to train on, 2 held out; 4 x 4 completions a step, 30 steps: 5.5
    passes over the prompts'
    """
    prompts = len(run.source.stream.prompts)
    all_held_out, looked_at = len(run.environment.prompts("test")), len(run.test_prompts)
    some = f" ({looked_at:,} of them evaluated)" if looked_at < all_held_out else ""
    steps = "1 step" if config.num_steps == 1 else f"{config.num_steps:,} steps"
    if isinstance(run.source.stream, PromptStream):  # another order has no passes
        steps += f": {config.num_steps * config.groups_per_step / prompts:.3g} passes over the prompts"
    return (
        f"{config.model.name}: {size_of(run.policy)}; "
        f"{prompts:,} prompts to train on, {all_held_out:,} held out{some}; "
        f"{config.groups_per_step:,} x {config.group_size:,} completions a step, {steps}"
    )


def size_of(policy: Policy) -> str:
    """Count the policy's weights, and those that are trained.

    >>> size_of(policy)
    '494M parameters, 8.80M of them trained (1.8 %)'
    """
    whole = policy.causal_lm.num_parameters()
    trained = policy.causal_lm.num_parameters(only_trainable=True)
    if trained == whole:
        return f"{count(whole)} parameters, all trained"
    return f"{count(whole)} parameters, {count(trained)} of them trained ({percent(trained / whole)})"


def crowding(run: Run, config: Config) -> str | None:
    """Return a warning where a step takes more prompts than there are, else None."""
    prompts = len(run.source.stream.prompts)
    if config.groups_per_step <= prompts:
        return None
    times = config.groups_per_step / prompts
    return (
        f"groups_per_step={config.groups_per_step} takes each of {prompts} training prompts {times:.3g} times a step; "
        "a larger group_size would compare more answers to each"
    )
