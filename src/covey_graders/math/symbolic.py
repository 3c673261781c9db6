"""Grading schemes that use math-verify, unlike covey's own.

Neither its time nor its memory is bounded, and its own time limits are alarms that work in a main thread only, so they
are off here: `verifier` calls these functions in worker processes that can be killed. For that this module imports
nothing heavy until it is called.
"""

import logging


def trl_accuracy(completion: str, gold: str) -> float | None:
    """Compute TRL's accuracy_reward, where the gold is bare LaTeX."""
    return trl_verdict(completion, f"${gold}$")


def trl_verdict(
    completion: str, solution: str, *, parse_seconds: int | None = None, verify_seconds: int | None = None
) -> float | None:
    """Compute TRL's accuracy_reward (f2cd5771), None where the solution does not parse.

    The solution is read by math-verify's defaults. Only LaTeX counts in the completion, a box first, and only one with
    an anchor (a box, or an environment after the word answer); the first match decides. The limits are alarms, for
    which this must be the main thread.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    _silence()
    expected = parse(solution, parsing_timeout=parse_seconds)
    if not expected:
        return None
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    found = parse(completion, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=parse_seconds)
    return float(verify(expected, found, timeout_seconds=verify_seconds))


def math_verify_accuracy(completion: str, gold: str) -> float:
    """Return math-verify's verdict with its own settings: 1 or 0."""
    from math_verify import parse, verify

    _silence()
    expected = parse(f"${gold}$", parsing_timeout=None)
    return float(verify(expected, parse(completion, parsing_timeout=None), timeout_seconds=None))


def torchrl_equal(answer: str, gold: str) -> bool:
    """Compare an answer tag with a box as TorchRL does (ae9719f1).

    The answer is math-verify's reference there and the gold its candidate, and neither is marked as mathematics; so
    LaTeX is read only where it brings its own dollar signs, and else the last number of each side decides.
    """
    from math_verify import parse, verify

    _silence()
    return bool(verify(parse(answer, parsing_timeout=None), parse(gold, parsing_timeout=None), timeout_seconds=None))


def _silence() -> None:
    """Silence math-verify's warning that its time limits are off."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
