"""Confidence intervals of measured shares and means, in plain Python."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

FEW_PROMPTS = 20
"""Fewest prompts that can show anything; a mean of fewer unbounded values has no interval."""
SHARE = (0.0, 1.0)
"""Bounds of a share, and of rewards that are never below 0 or above 1."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured value with its confidence interval, whose ends may be NaN."""

    value: float
    low: float
    high: float


UNKNOWN = Estimate(math.nan, math.nan, math.nan)
"""Estimate without measurements."""


def wilson(successes: float, trials: float, confidence: float) -> Estimate:
    """Return Wilson's score interval of a proportion (JASA 22:209, 1927).

    It holds near 0 and 1. `trials` may be fractional. NaN for 0 trials.
    """
    if trials == 0:
        return UNKNOWN
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half))


def student(confidence: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t, to 1 in 1,000.

    By Abramowitz and Stegun 26.7.5; exact for 1 and 2. Fractions of a degree of freedom are dropped below 3.
    """
    if freedom < 3:
        return math.tan(math.pi * confidence / 2) if freedom < 2 else confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4


def mean_interval(values: Sequence[float], confidence: float, bounds: tuple[float, float] | None = None) -> Estimate:
    """Return Student's interval of a mean over prompts, the independent units.

    Between bounds it stays inside them and is wide where all values are equal: half an observation more is put at each
    bound. Without bounds there is none of fewer than 20 values, or of equal ones, whose spread is not seen.
    """
    if not values:
        return UNKNOWN
    mean, number = fmean(values), len(values)
    # By sums: the fractions of statistics.stdev take minutes for the windows of a long run
    if bounds is None:
        square = math.fsum((value - mean) ** 2 for value in values)
        if number < FEW_PROMPTS or square <= 1e-24 * number * max(1.0, mean * mean):
            return Estimate(mean, math.nan, math.nan)
        half = student(confidence, number - 1) * math.sqrt(square / (number - 1) / number)
        return Estimate(mean, mean - half, mean + half)
    low, high = bounds
    centre = (math.fsum(values) + (low + high) / 2) / (number + 1)
    square = math.fsum((value - centre) ** 2 for value in values) + ((low - centre) ** 2 + (high - centre) ** 2) / 2
    half = student(confidence, number) * math.sqrt(square) / (number + 1)
    return Estimate(mean, max(low, centre - half), min(high, centre + half))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that one of k attempts is correct (arXiv 2107.03374).

    It is unbiased, from c correct of n. ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k must be in [1, num_samples={n}], got {k}")
    if not 0 <= c <= n:
        raise ValueError(f"num_correct must be in [0, num_samples={n}], got {c}")
    # 1 - C(n-c, k) / C(n, k); Python divides the two integers exactly, however long they are.
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def pass_of_each(num_scored: Iterable[int], num_right: Iterable[int], k: int) -> list[float]:
    """Return each prompt's pass@k, NaN where fewer than k were scored."""
    counts = zip(num_scored, num_right, strict=True)
    return [pass_at_k(n, c, k) if n >= k else math.nan for n, c in counts]


def bounds_of(values: Sequence[float]) -> tuple[float, float] | None:
    """Return (0, 1) where all rewards lie inside, else None."""
    return SHARE if all(0 <= value <= 1 for value in values) else None
