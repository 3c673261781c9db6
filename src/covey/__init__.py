"""covey: GRPO post-training of language models from verifiable rewards.

    result = covey.train("Qwen/Qwen2.5-0.5B-Instruct", rewards=exact, data=rows, num_steps=100)

Everything below is imported when it is first used; `import covey` loads nothing. docs/use/python.md explains each name.
"""

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "": "rewards",
    "covey.api.training": "train",
    "covey.api.parts": "build Parts",
    "covey.api.result": "Result",
    "covey.run.records.callbacks": "Callback StopTraining",
    "covey.config.schema": "Config ColdStartConfig EvaluationConfig OutputConfig",
    "covey.algorithm.settings": "AlgorithmConfig",
    "covey.rollouts.settings": "CurriculumConfig",
    "covey.environments.data.settings": "DataConfig",
    "covey.engine.settings": "EngineConfig SamplingConfig",
    "covey.policy.settings": "ModelConfig",
    "covey.trainer.settings": "OptimizerConfig",
    "covey.environments.base": "Environment",
    "covey.types": "RunStopped Prompt Completion Reward Failure Rollout Group Batch Message Sampling",
    "covey.run.evaluate": "Evaluation",
    "covey.algorithm.intervals": "Estimate",
    "covey.policy.policy": "Policy",
    "covey.policy.models.loading": "load_policy",
}
PUBLIC: dict[str, str] = {name: home for home, names in _HOMES.items() for name in names.split()}
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
