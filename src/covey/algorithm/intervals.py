"""Confidence intervals of measured shares and means, in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pvariance, stdev


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured value and its confidence interval."""

    value: float
    low: float
    high: float


UNKNOWN = Estimate(math.nan, math.nan, math.nan)
"""Of what nothing was measured."""


def wilson(successes: float, trials: float, confidence: float) -> Estimate:
    """Return Wilson's score interval of a proportion, which holds near 0 and 1 (JASA 22:209, 1927).

    `trials` may be fractional (see `share_interval`). NaN where there are none.
    """
    if trials == 0:
        return UNKNOWN
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: Sequence[float], confidence: float) -> Estimate:
    """Return the normal interval of a mean over prompts.

    Prompts are the independent units (completions of one prompt are not).
    """
    if not values:
        return UNKNOWN
    mean = fmean(values)
    spread = stdev(values) if len(values) > 1 else 0.0
    half = NormalDist().inv_cdf((1 + confidence) / 2) * spread / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def share_interval(values: Sequence[float], confidence: float) -> Estimate:
    """Return Wilson's interval of a mean over prompts of values in [0, 1].

    It stays inside and is honest at 0 and 1.

    Its number of trials is the effective one, p (1 - p) / (variance of the mean) (Korn and Graubard, Survey
    Methodology 24:193, 1998): the number of prompts where values are 0 or 1, more where they spread less.
    """
    if not values:
        return UNKNOWN
    p, variance = fmean(values), pvariance(values) / len(values)
    trials = p * (1 - p) / variance if variance > 0 else len(values)
    return wilson(p * trials, trials, confidence)
