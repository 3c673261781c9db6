"""Rewards of samples, whose module imports nothing heavy: workers that call them start in a moment."""

from typing import Any

import numpy as np


def simple_reward(samples: list[dict[str, Any]]) -> Any:
    out = []
    for s in samples:
        length_penalty = -0.001 * max(0, len(s["completion"].split()) - 512)
        out.append(length_penalty + (1.0 if s["completion"].strip().endswith(".") else 0.0))
    return np.array(out, dtype=np.float32)


def of_columns(samples: list[dict[str, Any]]) -> list[float]:
    assert all(set(sample) >= {"prompt", "completion", "response", "score"} for sample in samples)
    return [float(sample["score"]) for sample in samples]
