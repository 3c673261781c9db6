"""Small statistics in plain Python, for columns with gaps."""

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist, fmean, median, stdev

MAX_POINTS = 40
"""Maximum points of a trend, whose cost is quadratic; longer columns are averaged over neighbours."""
TO_SIGMA = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""


def theil_sen(values: Sequence[float]) -> float:
    """Return the median slope over all pairs (Sen, JASA 63:1379, 1968).

    >>> theil_sen([0, 1, 2, 90, 4])
    1.0
    """
    slopes = [(values[j] - values[i]) / (j - i) for i in range(len(values)) for j in range(i + 1, len(values))]
    return float(median(slopes)) if slopes else 0.0


def mann_kendall(values: Sequence[float]) -> float:
    """Return the two-sided p against no trend (Mann, Econometrica 13:245, 1945).

    >>> round(mann_kendall(range(10)), 5)
    8e-05
    """
    n = len(values)
    if n < 3:
        return 1.0
    signs = sum((b > a) - (b < a) for a, b in combinations(values, 2))
    sigma = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    z = (abs(signs) - 1) / sigma if signs else 0.0
    return 2 * (1 - NormalDist().cdf(z)) if z > 0 else 1.0


def thinned(values: Sequence[float]) -> list[float]:
    """Average neighbours until at most MAX_POINTS are left."""
    size = -(-len(values) // MAX_POINTS) if values else 1
    return [fmean(values[start : start + size]) for start in range(0, len(values), size)]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def spread(values: Sequence[float]) -> float:
    """Return the median absolute deviation, in standard deviations of a normal distribution."""
    middle = median(values)
    return TO_SIGMA * float(median(abs(value - middle) for value in values))


def binomial_tail(successes: int, trials: int) -> float:
    """Compute P(at least `successes` of fair trials): McNemar's exact test, one-sided.

    >>> binomial_tail(5, 5)
    0.03125
    """
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials if trials else 1.0
