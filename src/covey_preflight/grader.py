"""Check the grader before a run with a few wrong answers."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from covey.run.records.answer_text import shorten
from covey.system import collectives
from covey.types import Prompt
from covey_preflight.audit.cases import Case
from covey_preflight.audit.golds import Gold
from covey_preflight.audit.measure import Paid, Verdict, gold_forms
from covey_preflight.subject import Check, PreflightContext
from covey_preflight.text import judge_completions, trial_of

LOGGER = logging.getLogger(__name__)
NUM_PROMPTS = 2
QUOTED = 60
"""Characters of an answer in a remark."""
KINDS = ("near miss", "another row's", "every candidate", "form alone", "flattery")
"""Kinds of cases that are asked, one case of each."""


def check_grader(subject: PreflightContext) -> Check:
    """Warn where a wrong answer is paid like the right one."""
    environment = subject.run.environment
    golds = [(prompt, gold_forms(environment, prompt)) for prompt in subject.prompts]
    others = [forms[0].answer for _, forms in golds if forms]
    verdicts = [one for prompt, forms in golds[:NUM_PROMPTS] for one in _verdicts(subject, prompt, forms, others)]
    if not verdicts:
        return Check(True, "no right answers are known", "", applies=False)
    paid = [verdict for verdict in verdicts if verdict.is_wrong]
    figure = f"{len(paid)} of {len(verdicts)} wrong answers are paid like right ones"
    if paid and _pays_alike(subject, golds, paid[0].prompt_id):
        figure += "; rewards are the same with another row's right answer: perhaps the reward does not read it"
    if paid and collectives.is_main_process():
        first = paid[0]
        told = (figure, first.prompt_id, repr(shorten(first.case.text, QUOTED)), first.case.kind)
        LOGGER.warning("%s, first: prompt %s, %s (%s); covey audit shows all", *told)
    values = {"num_cases": float(len(verdicts)), "num_paid": float(len(paid))}
    return Check(True, figure, "", values=values)


def _verdicts(
    subject: PreflightContext, prompt: Prompt, forms: Sequence[Gold], others: Sequence[str]
) -> Iterator[Verdict]:
    """Yield the verdicts on wrong answers, if the right one pays."""
    said = _rewards(subject, prompt, ["", *(form.text for form in forms)]) if forms else []
    paid = Paid.of(forms, said[0], said[1:]) if said else None
    if paid is None:
        return
    cases = _chosen(paid.cases(prompt, others))
    rewards = _rewards(subject, prompt, [case.text for case in cases])
    for case, reward in zip(cases, rewards, strict=False):
        yield paid.verdict(prompt, case, reward)


def _pays_alike(subject: PreflightContext, golds: Sequence[tuple[Prompt, list[Gold]]], name: str) -> bool:
    """Return True if another row's columns leave every reward as it was."""
    (prompt, forms), *_ = [one for one in golds if one[0].id == name]
    for other, theirs in golds:
        if theirs and theirs[0].answer != forms[0].answer and subject.run.environment.gold(prompt) is None:
            texts = [form.text for form in (*forms, *theirs)]
            rewards = _rewards(subject, prompt, texts)
            return bool(rewards) and rewards == _rewards(subject, replace(prompt, columns=other.columns), texts)
    return False


def _chosen(cases: Sequence[Case]) -> list[Case]:
    firsts = {case.kind: case for case in reversed(cases)}
    return [firsts[kind] for kind in KINDS if kind in firsts]


def _rewards(subject: PreflightContext, prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """Return each text's reward, none if one failed."""
    policy = subject.run.policy
    end = sorted(policy.stop_ids)[:1]
    written = [[*policy.tokenizer(text, add_special_tokens=False)["input_ids"], *end] for text in texts]
    judge, own = trial_of(subject, prompt) or (subject.run.environment, prompt)
    found = judge_completions(subject, judge, own, written)
    return [] if isinstance(found, str) or len(found.rewards) != len(texts) else list(found.rewards)
