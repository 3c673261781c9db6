"""Reward rules: held-out accuracy, parts, repeated answers, a control."""

from collections.abc import Sequence
from statistics import fmean

from covey_doctor.finding import Evidence, Level
from covey_doctor.log import MIN_WINDOW, NOT_SHOWN, LogWindow, RunLog, RunPart
from covey_doctor.measures import binomial_tail, mann_kendall
from covey_doctor.rules.answers import wins_everywhere
from covey_doctor.rules.common import (
    Change,
    above,
    accuracy_change,
    chance_at_look,
    change_of,
    errors_at_look,
    evidence_of,
    from_to,
    has_curriculum,
    held_out_change,
    held_out_measure,
    held_out_seen,
    is_worse,
    looked,
    num_prompts,
    percent,
    reward_change,
    reward_name,
    samples_deny,
    since_look,
    since_moved,
)
from covey_doctor.verdicts import of_each, pair

OWN_PARTS = ("correct", "accuracy", "answer", "solved", "passed", "score", "tests", "exact")
"""Names of a reward part that is about the task itself."""
KEEPS_UP = 0.5
"""Share of the reward's gain: an accuracy that gains more shows no hacking, however few its prompts."""
MOST_LOOKS = 64
"""Earlier evaluations that the newest is compared with, evenly chosen where there are more."""


def hacking(log: RunLog) -> Evidence | None:
    """Find a reward that rises while held-out accuracy does not."""
    reward, accuracy = reward_change(log), accuracy_change(log)
    if reward is None or accuracy is None or reward.z < 3 or reward.gain < 0.02 or accuracy.z > 1:
        return None
    if has_curriculum(log) and accuracy.z > -2:
        return None
    fell = is_worse(accuracy, log)
    # Few prompts may not show a gain that keeps up with the reward's
    hides_gain = accuracy.gain + 2 * accuracy.error > reward.gain
    if not fell and (accuracy.first > 0.9 or hides_gain or accuracy.gain > KEEPS_UP * reward.gain):
        return None
    is_sure = accuracy.gain + errors_at_look(log) * accuracy.error < reward.gain
    is_sick = fell or (reward.z > 8 and accuracy.gain < 0.1 * reward.gain and is_sure)
    level = _of_greedy(log) if is_sick else Level.WATCH
    text = f"the training reward rose {reward.seen()}, held-out accuracy went {accuracy.seen(percent)}"
    # Rewards that cannot reach what counts as right, such as a distance below 0, have no accuracy that could rise
    if all(value == 0 for _, value in log.looks_at("accuracy")):
        level, text = Level.WATCH, f"{text}: no answer reaches evaluation.correct_above"
    values = {"reward_z": reward.z, "accuracy_z": accuracy.z}
    return Evidence(level, text, since_moved(log, reward_name(log)), None, values)


def format_only(log: RunLog) -> Evidence | None:
    """Find a gain in form without one in correctness."""
    names = [name for name in log.columns if name.startswith("reward/")]
    parts = {name[7:]: change for name in names if (change := change_of(log, name))}
    names = list(parts)
    own = next((name for wanted in OWN_PARTS for name in names if wanted in name.lower()), None)
    weights = _weights(log, list(parts))
    total = sum(weights[name] * max(0.0, change.gain) for name, change in parts.items())
    if own is None or len(parts) < 2 or total < 0.02:
        return None
    rest = total - weights[own] * max(0.0, parts[own].gain)
    largest = max((name for name in parts if name != own), key=lambda name: weights[name] * parts[name].gain)
    if rest < 0.8 * total or parts[largest].z < 3:
        return None
    shown = f"{percent(rest / total)} of the gain is not of the part {own}"
    text = f"{shown}: {largest} rose {parts[largest].seen()}, {own} went {parts[own].seen()}"
    level = Level.SICK if parts[own].z < -2 else Level.WATCH
    return Evidence(level, text, since_moved(log, f"reward/{largest}"), values={"share": rest / total})


def _weights(log: RunLog, names: Sequence[str]) -> dict[str, float]:
    given, functions = log.setting("reward_weights") or [], log.setting("rewards") or []
    # Parts are logged in the order in which answers first had them, weights are in that of the functions
    order = [str(one.get("function") if isinstance(one, dict) else one).rpartition(":")[2] for one in functions]
    order = order if {*names} <= {*order} else list(names)
    found = dict(zip(order, map(float, given), strict=True)) if len(given) == len(order) else {}
    return {name: found.get(name, 1.0) for name in names}


def forged(log: RunLog) -> Evidence | None:
    """Find rewards that a re-check revokes, or one text's everywhere."""
    for name in log.columns:
        if not (name.startswith("environment/") and name.endswith("/recheck_disagreements")):
            continue
        caught = [(step, value) for step, value in log.known(name) if value > 0]
        if caught:
            total = sum(value for _, value in caught)
            return Evidence(Level.SICK, f"{total:.0f} programs of full score failed other tests", caught[0][0])
    return wins_everywhere(log)


def train_eval_gap(log: RunLog) -> Evidence | None:
    """Find a training reward above the held-out one, before each evaluation."""
    gaps, name = _gaps(log), reward_name(log)
    if len(gaps) < 2 or has_curriculum(log) or log.setting("algorithm.group_filter"):
        return None
    rewards, (first, _), (last, error) = log.values(name), gaps[0], gaps[-1]
    scale = max(max(rewards) - min(rewards), abs(gaps[-1][0].value), 1e-9) if max(map(abs, rewards)) > 1 else 1.0
    error = (error**2 + 0.25 * scale**2 / num_prompts(log)) ** 0.5
    if last.value < 0.15 * scale or last.value - 2 * error < 0.05 * scale or last.value <= first.value + 0.05 * scale:
        return None
    text = f"the training reward less that of held-out prompts went {from_to(first, last)}"
    since = since_look([(gap.last, gap.value) for gap, _ in gaps])
    return Evidence(Level.WATCH, text, since, values={"gap": last.value, "first": first.value})


def _gaps(log: RunLog) -> list[tuple[RunPart, float]]:
    """Return each window's gap to its evaluation, with the error.

    A look before the first step has the first window: what is learnt there makes its gap larger, which excuses.
    """
    points, found = log.known(reward_name(log)), []
    for look, value in log.looks_at("reward_mean"):
        end = max(look, points[0][0] + log.width - 1) if points else look
        near = [(step, reward) for step, reward in points if end - log.width < step <= end]
        if len(near) >= MIN_WINDOW:
            window = LogWindow.of(near)
            found.append((RunPart(window.mean - value, window.first, window.last), window.error))
    return found


def forgetting(log: RunLog) -> Evidence | None:
    """Find prompts solved before and not now, beyond chance."""
    if len(log.verdicts) < 2 or held_out_measure(log) != "accuracy":
        return None
    *before, last = log.verdicts
    earlier = [before[place * len(before) // MOST_LOOKS] for place in range(MOST_LOOKS)]
    earlier = earlier if len(before) > MOST_LOOKS else before
    # Compare losses with gains by an exact sign test (McNemar), corrected for all that are made in the run's life
    bound = chance_at_look(log) / len(earlier)
    worst: tuple[float, int, int, int, list[str]] | None = None
    for look in earlier:
        pairs = list(zip(*pair(look, last, "accuracy"), strict=True))
        num_lost, gained = (sum(pair == way for pair in pairs) for way in ((1.0, 0.0), (0.0, 1.0)))
        solved = sum(then == 1 for then, _ in pairs)
        p = binomial_tail(num_lost, num_lost + gained)
        if solved and num_lost > 0.05 * solved and p < bound and (worst is None or p < worst[0]):
            is_right = dict(zip(last["prompts"], of_each(last, "accuracy"), strict=True))
            names = zip(look["prompts"], look["ids"], of_each(look, "accuracy"), strict=True)
            lost = [name for prompt, name, then in names if then == 1 and is_right.get(prompt) == 0]
            worst = (p, look["step"], solved, gained, lost)
    if worst is None:
        return None
    p, step, solved, gained, lost = worst
    then, now = (looked((one, 0.0)).steps for one in (step, last["step"]))
    text = f"of {solved} held-out prompts solved ({then}), {len(lost)} are lost ({now}); {gained} were gained"
    seen = f"{text} (p {p:.1g})"
    return Evidence(_of_greedy(log), seen, step + 1, values={"lost": len(lost), "p": p}, prompts=tuple(lost[:4]))


def _of_greedy(log: RunLog) -> Level:
    """Return the severity of worse greedy answers: to watch if samples deny it."""
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
    return held_out_change(log) or reward_change(log)


def not_shown(log: RunLog) -> Evidence | None:
    """Find a result that chance may have made."""
    said = log.summary.get(NOT_SHOWN)
    return Evidence(Level.NOTE, str(said), None) if said else None


def got_worse(log: RunLog) -> Evidence | None:
    """Find a run that is below its beginning for two evaluations."""
    change, looks = held_out_change(log), log.looks_at(held_out_measure(log))
    if change is not None and is_worse(change, log):
        best = max(looks, key=lambda one: one[1])
        text = f"{held_out_seen(change, log)}, best {looked(best).steps}"
        return Evidence(_of_greedy(log), text, since_look(looks), values={"z": change.z})
    # Else a lasting fall of the training reward. An accuracy of 0 throughout has nothing to lose
    can_fall = change is not None and max(value for _, value in looks) > 0
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
