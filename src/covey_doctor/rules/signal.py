"""Signal rules: differences within groups, prompts, few answers."""

from collections import Counter
from dataclasses import replace
from statistics import fmean

from covey_doctor.finding import Evidence, Level
from covey_doctor.log import RunLog
from covey_doctor.rules.common import above, accuracy_change, evidence_of, is_rising, percent, reward_name

NO_SIGNAL_WATCH, NO_SIGNAL_SICK = 0.6, 0.9
SOLVED = 0.95
"""Held-out accuracy above which little is left to learn."""
FEW_PROMPTS, MANY_PASSES = 4, 20
"""Different prompts in steps' worth of them; how often each was seen."""
TOP_SHARES = 0.3, 0.4
"""Shares to watch, and sick; centred within its group one answer holds half of the group's advantages at most."""
LONG_ANSWER = 8
"""Tokens; shorter answers repeat in every group of a trained policy."""


def no_signal(log: RunLog) -> Evidence | None:
    """Find groups with equal rewards, unless they are solved."""
    right, wrong = _shares(log)
    is_solved = right > wrong and not _has_reward_without_accuracy(log)
    trained = log.values("num_rollouts_trained")
    if len(trained) >= 2 and not any(trained):
        is_sure = len(trained) >= log.width or log.summary.get("status") == "completed"
        why = "" if log.values(reward_name(log)) else ": no answer was scored"
        if any(log.values("dropped/unscored_rollouts")) and not any(log.values("num_groups")):
            why = ": no group had two answers that could be judged (covey.log has the reasons)"
        seen = f"none of the {len(trained)} steps made an update, so nothing was learnt{why}"
        return Evidence(Level.SICK if is_sure and not is_solved else Level.WATCH, seen, log.steps[0])
    if is_solved:
        return None
    text = "the rewards of {} of the groups are all equal, so nothing follows from them"
    return above(log, "zero_std_fraction", NO_SIGNAL_WATCH, NO_SIGNAL_SICK, text)


def too_hard(log: RunLog) -> Evidence | None:
    """Find groups without signal that are wrong throughout."""
    right, wrong = _shares(log)
    span = log.lasting("all_wrong_fraction", lambda window: window.mean >= NO_SIGNAL_WATCH)
    if span is None or wrong <= 4 * right:
        return None
    # Rewards of 0 and below that differ are no verdict of wrong, as where an answer costs its distance from the best
    first, last = span.windows[0].first, span.windows[-1].last
    equal = [one.mean for one in log.windows("zero_std_fraction") if one.last >= first and one.first <= last]
    if equal and fmean(equal) < NO_SIGNAL_WATCH:
        return None
    level = Level.SICK if span.mean >= NO_SIGNAL_SICK else Level.WATCH
    return evidence_of(
        level, span, f"every answer is wrong in {percent(wrong)} of the groups, right in {percent(right)}"
    )


def too_easy(log: RunLog) -> Evidence | None:
    """Find groups that are right throughout, or a solved task."""
    right, wrong = _shares(log)
    span = log.lasting("zero_std_fraction", lambda window: window.mean >= NO_SIGNAL_WATCH)
    if span is None or right <= wrong:
        return None
    change = accuracy_change(log)
    if _has_reward_without_accuracy(log):
        return None
    level = Level.NOTE if change is not None and change.first <= SOLVED < change.last else Level.WATCH
    end = f"; held-out accuracy is {percent(change.last)}" if change else ""
    # Groups without signal may have been wrong before they were right
    easy = log.lasting("all_correct_fraction", lambda window: window.mean >= NO_SIGNAL_WATCH / 2)
    span = replace(span, since=max(span.since, easy.since if easy else span.windows[-1].first))
    return evidence_of(level, span, f"every answer is right in {percent(right)} of the groups{end}")


def _has_reward_without_accuracy(log: RunLog) -> bool:
    change = accuracy_change(log)
    return change is not None and change.last < 0.5


def _shares(log: RunLog) -> tuple[float, float]:
    found = []
    for name in ("all_correct_fraction", "all_wrong_fraction"):
        windows = log.windows(name)[-2:]
        found.append(fmean(window.mean for window in windows) if windows else 0.0)
    return found[0], found[1]


def duplicates(log: RunLog) -> Evidence | None:
    """Find groups of nearly equal, longer answers.

    Answers grow alike too where a policy learns the one that is right: that is none while the task is solved, and to
    watch while it gets better.
    """
    lengths = log.usual("completion_length_mean")
    if lengths is None or lengths.value <= LONG_ANSWER:
        return None
    span = log.lasting("unique_fraction", lambda window: window.mean < 0.25)
    if span is None:
        return None
    change = accuracy_change(log)
    if change is not None and change.last > SOLVED:
        return None
    level = Level.SICK if span.mean < 0.15 and not is_rising(log) else Level.WATCH
    return evidence_of(level, span, f"only {percent(span.mean)} of a group's answers differ from each other")


def few_carry(log: RunLog) -> Evidence | None:
    """Find updates that hang on a hundredth of the answers."""
    rollouts = log.usual("num_rollouts_trained")
    silent = log.windows("zero_std_fraction")
    # One of few is no hundredth, and of one group with a signal the best answer always holds much
    if (rollouts is not None and rollouts.value < 32) or (silent and silent[-1].mean > NO_SIGNAL_WATCH):
        return None
    text = "the hundredth of the answers with the largest advantages holds {} of their sum"
    return above(log, "advantage_top_share", *TOP_SHARES, text)


def few_prompts(log: RunLog) -> Evidence | None:
    """Find runs that go over few prompts again and again."""
    of_steps = [row.get("groups") or [] for row in log.updates]
    has_all = all(row.get("num_groups") == len(own) for row, own in zip(log.updates, of_steps, strict=True))
    seen = Counter(str(group.get("prompt_id")) for own in of_steps for group in own)
    if not has_all or len(of_steps) < 2 * log.width:  # the file may have had no room for all groups
        return None
    per_step = fmean(row["num_groups"] for row in log.updates)
    passes = fmean(seen.values()) if seen else 0.0
    if passes <= MANY_PASSES and len(seen) >= FEW_PROMPTS * per_step:
        return None
    text = f"{len(seen)} different prompt{'s' * (len(seen) != 1)} in all, each seen {passes:.0f} times"
    few = passes > MANY_PASSES and len(seen) < FEW_PROMPTS * per_step
    return Evidence(Level.WATCH if few else Level.NOTE, text, None, values={"prompts": len(seen), "passes": passes})


def much_dropped(log: RunLog) -> Evidence | None:
    """Find runs that throw most of their samples away."""
    sampled, trained = log.known("num_groups_sampled"), dict(log.known("num_groups"))
    shares = ((step, 1 - trained[step] / number) for step, number in sampled if number > 0 and step in trained)
    span = log.derived("dropped", shares).lasting("dropped", lambda window: window.mean > 0.5)
    if span is None:
        return None
    reasons = [(sum(log.values(name)), name[8:]) for name in log.columns if name.startswith("dropped/")]
    most = f", most of them as {max(reasons)[1].replace('_', ' ')}" if reasons else ""
    level = Level.SICK if span.mean > 0.9 else Level.WATCH
    return evidence_of(level, span, f"{percent(span.mean)} of the sampled groups were not trained{most}")
