"""Is the reward what one wants: against held-out accuracy, its parts, repeated answers, a control."""

from collections.abc import Sequence
from statistics import fmean

from covey.run.doctor.finding import Evidence, Level
from covey.run.doctor.log import MIN_WINDOW, Part, RunLog
from covey.run.doctor.measures import binomial_tail, mann_kendall
from covey.run.doctor.rules.answers import wins_everywhere
from covey.run.doctor.rules.common import (
    Change,
    above,
    accuracy_change,
    change_of,
    evidence_of,
    from_to,
    has_curriculum,
    looked,
    num_prompts,
    percent,
    reward_change,
    reward_name,
    samples_deny,
    since_look,
    since_moved,
)

OWN_PARTS = ("correct", "accuracy", "answer", "solved", "passed", "score", "tests", "exact")
"""How the part of a reward is called that is about the task itself."""
KEEPS_UP = 0.5
"""Of the reward's gain: an accuracy that gains more shows no hacking, however few prompts it is measured on."""
FEW_HELD_OUT = 200
"""Prompts; with fewer an interval is wider than most gains."""


def hacking(log: RunLog) -> Evidence | None:
    """Find a reward that rises while held-out accuracy does not."""
    reward, accuracy = reward_change(log), accuracy_change(log)
    if reward is None or accuracy is None or reward.z < 3 or reward.gain < 0.02 or accuracy.z > 1:
        return None
    if has_curriculum(log) and accuracy.z > -2:
        return None
    fell = accuracy.z < -2
    # Few prompts may not show a gain that keeps up with the reward's
    hides_gain = accuracy.gain + 2 * accuracy.error > reward.gain
    if not fell and (accuracy.first > 0.9 or hides_gain or accuracy.gain > KEEPS_UP * reward.gain):
        return None
    level = Level.SICK if fell or (reward.z > 8 and accuracy.gain < 0.1 * reward.gain) else Level.WATCH
    text = f"the training reward rose {reward.seen()}, held-out accuracy went {accuracy.seen(percent)}"
    # Rewards that cannot reach what counts as right, such as a distance below 0, have no accuracy that could rise
    if all(value == 0 for _, value in log.looks_at("accuracy")):
        level, text = Level.WATCH, f"{text}: no answer reaches evaluation.correct_above"
    values = {"reward_z": reward.z, "accuracy_z": accuracy.z}
    return Evidence(level, text, since_moved(log, reward_name(log)), None, values)


def format_only(log: RunLog) -> Evidence | None:
    """Find a gain that comes from the form of answers, not from their being right."""
    parts = {
        name[7:]: change for name in log.columns if name.startswith("reward/") and (change := change_of(log, name))
    }
    own = _own_part(list(parts))
    weights = _weights(log, list(parts))
    total = sum(weights[name] * max(0.0, change.gain) for name, change in parts.items())
    if own is None or len(parts) < 2 or total < 0.02:
        return None
    # Gain outside the part that says what is right
    rest = total - weights[own] * max(0.0, parts[own].gain)
    largest = max((name for name in parts if name != own), key=lambda name: weights[name] * parts[name].gain)
    if rest < 0.8 * total or parts[largest].z < 3:
        return None
    shown = f"{percent(rest / total)} of the gain is not of the part {own}"
    text = f"{shown}: {largest} rose {parts[largest].seen()}, {own} went {parts[own].seen()}"
    level = Level.SICK if parts[own].z < -2 else Level.WATCH
    return Evidence(level, text, since_moved(log, f"reward/{largest}"), values={"share": rest / total})


def _own_part(names: Sequence[str]) -> str | None:
    return next((name for wanted in OWN_PARTS for name in names if wanted in name.lower()), None)


def _weights(log: RunLog, names: Sequence[str]) -> dict[str, float]:
    given = log.setting("reward_weights") or []
    if len(given) != len(names):
        given = [1.0] * len(names)
    return dict(zip(names, map(float, given), strict=True))


def forged(log: RunLog) -> Evidence | None:
    """Find rewards that a second look takes back, or that one text wins everywhere."""
    # Full scores that other tests take back
    for name in ("environment/recheck_disagreements", *_ends_with(log, "/recheck_disagreements")):
        caught = [(step, value) for step, value in log.known(name) if value > 0]
        if caught:
            total = sum(value for _, value in caught)
            return Evidence(Level.SICK, f"{total:.0f} programs of full score failed other tests", caught[0][0])
    return wins_everywhere(log)


def _ends_with(log: RunLog, end: str) -> list[str]:
    return [name for name in log.columns if name.startswith("environment/") and name.endswith(end)]


def train_eval_gap(log: RunLog) -> Evidence | None:
    """Find a training reward that leaves the same reward of held-out prompts behind."""
    name, looks = reward_name(log), log.looks_at("reward_mean")
    # Excuse runs whose prompts differ from the held-out ones
    windows = log.windows(name)
    if len(looks) < 2 or len(windows) < 2 or has_curriculum(log) or log.setting("algorithm.group_filter"):
        return None
    rewards = log.values(name)
    scale = max(max(rewards) - min(rewards), abs(looks[-1][1]), 1e-9) if max(map(abs, rewards)) > 1 else 1.0
    # Compare the gaps at both ends, on the scale of the reward
    first, last = windows[0].mean - looks[0][1], windows[-1].mean - looks[-1][1]
    error = (windows[-1].error ** 2 + 0.25 * scale**2 / num_prompts(log)) ** 0.5
    if last < 0.15 * scale or last - 2 * error < 0.05 * scale or last <= first + 0.05 * scale:
        return None
    gaps = from_to(Part(first, windows[0].first, windows[0].last), Part(last, windows[-1].first, windows[-1].last))
    text = f"the training reward less that of held-out prompts went {gaps}"
    return Evidence(Level.WATCH, text, since_look(_gaps(log)), values={"gap": last, "first": first})


def _gaps(log: RunLog) -> list[tuple[int, float]]:
    """Return the step of each evaluation, and how far the training reward lay above its own."""
    windows = log.windows(reward_name(log))

    def training(step: int) -> float:
        return next((window.mean for window in reversed(windows) if window.first <= step), windows[0].mean)

    return [(step, training(step) - value) for step, value in log.looks_at("reward_mean")]


def forgetting(log: RunLog) -> Evidence | None:
    """Find held-out prompts that were solved at an evaluation and are not any more, more than chance explains."""
    # Greedy verdicts on held-out prompts, by evaluation
    of_step: dict[int, dict[str, bool]] = {}
    for row in log.answers:
        if row.get("greedy"):
            of_step.setdefault(row["step"], {})[str(row["prompt_id"])] = bool(row.get("correct"))
    steps = sorted(of_step)
    if len(steps) < 2:
        return None
    last = of_step[steps[-1]]
    # Compare losses with gains by an exact sign test (McNemar)
    worst: tuple[float, int, int, int, list[str]] | None = None
    for step in steps[:-1]:
        shared = [name for name in of_step[step] if name in last]
        lost = [name for name in shared if of_step[step][name] and not last[name]]
        gained = sum(last[name] and not of_step[step][name] for name in shared)
        solved = sum(of_step[step][name] for name in shared)
        p = binomial_tail(len(lost), len(lost) + gained)
        if solved and len(lost) > 0.05 * solved and p < 0.01 and (worst is None or p < worst[0]):
            worst = (p, step, solved, gained, lost)
    if worst is None:
        return None
    p, step, solved, gained, lost = worst
    before, after = (looked((one, 0.0)).steps for one in (step, steps[-1]))
    text = f"of {solved} held-out prompts solved ({before}), {len(lost)} are lost ({after}); {gained} were gained"
    seen = f"{text} (p {p:.1g})"
    return Evidence(_of_greedy(log), seen, step + 1, values={"lost": len(lost), "p": p}, prompts=tuple(lost[:4]))


def _of_greedy(log: RunLog) -> Level:
    """Return how bad it is that greedy answers got worse: only to watch where sampled ones deny it."""
    return Level.WATCH if samples_deny(log) else Level.SICK


def noisy_verifier(log: RunLog) -> Evidence | None:
    """Find the same answer judged twice, differently."""
    text = "{} of the answers have a twin in their group, word for word, with another reward"
    found = above(log, "disagreement_fraction", 0.01, 0.05, text, strict=True)
    if found is not None:
        return found
    # A policy that wrong rewards have spoilt soon has no twins left: its first steps tell
    windows, begin = log.windows("disagreement_fraction"), log.known("disagreement_fraction")[:MIN_WINDOW]
    seen = [(windows[0].mean, windows[0].first)] if len(windows) == 1 else []
    if len(begin) == MIN_WINDOW:
        seen.append((fmean(value for _, value in begin), begin[0][0]))
    share, first = max(seen, default=(0.0, 0))
    return Evidence(Level.SICK, text.format(percent(share)), first) if share > 0.05 else None


def without_signal(log: RunLog) -> Evidence | None:
    """Find a gain that shuffled rewards bring as well."""
    if log.control is None:
        return None
    own, other = _gain(log), _gain(log.control)
    if own is None or other is None or own.gain <= 0 or other.gain < 0.5 * own.gain or other.z < 2:
        return None
    text = f"with shuffled rewards the control went {other.seen()}, the run itself {own.seen()}"
    return Evidence(Level.SICK, text, None, values={"own": own.gain, "control": other.gain})


def _gain(log: RunLog) -> Change | None:
    return accuracy_change(log) or reward_change(log)


def not_shown(log: RunLog) -> Evidence | None:
    """Find a result that chance may have made."""
    change = accuracy_change(log)
    if change is None or log.summary.get("status") != "completed":
        return None
    number = num_prompts(log)
    text = f"accuracy went {change.seen(percent)} on {number} prompt{'s' * (number > 1)}"
    if abs(change.z) < 1.96:
        return Evidence(Level.NOTE, f"{text}: the interval of the gain holds 0", None, values={"z": change.z})
    if number < FEW_HELD_OUT and abs(change.z) < 3.3:
        return Evidence(Level.NOTE, f"{text}: few, for a gain of this size", None, values={"z": change.z})
    return None


def got_worse(log: RunLog) -> Evidence | None:
    """Find a run that ends, or has been for two evaluations, below where it began."""
    # Held-out accuracy, where it was measured twice
    change = accuracy_change(log)
    if change is not None and change.z < -3:
        looks = log.looks_at("accuracy")
        best = max(looks, key=lambda one: one[1])
        text = f"held-out accuracy fell {change.seen(percent)}, best {looked(best).steps}"
        return Evidence(_of_greedy(log), text, since_look(looks), values={"z": change.z})
    # Else a lasting fall of the training reward. An accuracy of 0 throughout has nothing to lose
    can_fall = change is not None and max(value for _, value in log.looks_at("accuracy")) > 0
    if can_fall or has_curriculum(log):
        return None
    reward = reward_change(log)
    values = log.windows(reward_name(log))
    if reward is None or reward.z > -4 or mann_kendall([window.mean for window in values]) > 0.2:
        return None
    span = log.lasting(reward_name(log), lambda window: window.mean < reward.first - 3 * reward.error)
    if span is None:
        return None
    return evidence_of(Level.SICK, span, f"the reward fell {reward.seen()}")
