"""covey: GRPO post-training of language models from verifiable rewards.

    result = covey.train("Qwen/Qwen2.5-0.5B-Instruct", rewards=exact, data=rows, num_steps=100)

Everything below is imported when it is first used; `import covey` loads nothing. docs/use/python.md explains each name.
"""

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

PUBLIC: dict[str, str] = {
    # A whole run, and the loop in your hands
    "train": "",
    "build": "covey.api.parts",
    "Result": "covey.api.result",
    "Parts": "covey.api.parts",
    "Callback": "covey.run.records.callbacks",
    "StopTraining": "covey.run.records.callbacks",
    # Settings
    "Config": "covey.config.schema",
    "AlgorithmConfig": "covey.algorithm.settings",
    "ColdStartConfig": "covey.config.schema",
    "CurriculumConfig": "covey.rollouts.settings",
    "DataConfig": "covey.environments.data.settings",
    "EngineConfig": "covey.engine.settings",
    "EvaluationConfig": "covey.config.schema",
    "ModelConfig": "covey.policy.settings",
    "OptimizerConfig": "covey.trainer.settings",
    "OutputConfig": "covey.config.schema",
    "SamplingConfig": "covey.engine.settings",
    # Rewards and environments
    "rewards": "",
    "Environment": "covey.environments.base",
    "RunStopped": "covey.types",
    # The five types and what they hold
    "Prompt": "covey.types",
    "Completion": "covey.types",
    "Reward": "covey.types",
    "Failure": "covey.types",
    "Rollout": "covey.types",
    "Group": "covey.types",
    "Batch": "covey.types",
    "Message": "covey.types",
    "Sampling": "covey.types",
    # What was measured
    "Evaluation": "covey.run.evaluate",
    "Estimate": "covey.algorithm.intervals",
    # A policy alone
    "Policy": "covey.policy.policy",
    "load_policy": "covey.policy.models.loading",
}
"""Every public name and the module it comes from; "" for a module of that name. `__init__.pyi` gives the types."""

__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'covey' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    home = PUBLIC[name]
    found = vars(import_module(home))[name] if home else import_module(f"covey.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({"__doc__", "__file__", "__name__", "__path__", "__version__", *PUBLIC})
