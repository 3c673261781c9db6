"""Checks of a masked policy's run before its first step: what the infill document's checklist asks for.

That policy, reference and judge load, that inputs have masked tokens and that engine and trainer agree is measured by
the other checks.
"""

from dataclasses import replace

from covey.environments.base import Judges
from covey.forward import Forward, objective_inputs, prepare
from covey.policy import sharding
from covey.policy.logprobs import Scoring, score_tokens
from covey.policy.policy import inference
from covey.preflight_policy import whole_batch
from covey.preflight_types import Finding, Subject

KL_TOLERANCE = 1e-5
"""Nats a token between a policy and the reference it is equal to."""
SPREAD = 1e-9
"""Rewards closer than this are the same."""


def check_frozen(subject: Subject) -> Finding:
    """Reference and judge have nothing to train."""
    reference, environment = subject.run.trainer.reference, subject.run.environment
    faults = []
    if reference is not None and reference.policy.model is not subject.run.policy.model:
        faults += ["the reference" for p in reference.policy.model.parameters() if p.requires_grad][:1]
    if isinstance(environment, Judges) and not environment.is_frozen:
        faults.append("the judge")
    names = [name for name, there in (("reference", reference), ("judge", isinstance(environment, Judges))) if there]
    if faults:
        return Finding(False, f"{faults[0]} has weights that would be trained", "none", "freeze it")
    return Finding(True, f"{' and '.join(names) or 'neither reference nor judge'} frozen", "nothing trained")


def check_kl(subject: Subject) -> Finding:
    """Before the first step the policy is its reference: the KL that is penalised begins at 0."""
    run, config = subject.run, subject.config
    reference, objective = run.trainer.reference, run.trainer.objective
    if reference is None or not objective.kl.active:
        return Finding(True, "no KL to a reference", "", applies=False)
    scoring = Scoring(run.source.sampling, config.logprob_chunk)
    forward = Forward(run.policy, reference, objective, scoring)
    found = 0.0
    for micro_batch in whole_batch(subject).micro_batches:
        prepared = prepare(forward, micro_batch, several=False, keep_old=False)
        with inference(run.policy.model):
            exact = reference if objective.needs_full_kl else None
            scores = score_tokens(run.policy, micro_batch, scoring, prepared.kept, exact)
        kl_NT = objective.kl_values(objective_inputs(prepared, scores))
        found = max(found, float(kl_NT.abs().max()))
    remedy = "the reference is not the policy that is trained: look at model and cold_start"
    figure = f"KL to the reference is {found:.2g} nats on a token at most, before any update"
    return Finding(found <= KL_TOLERANCE, figure, f"{KL_TOLERANCE:g}", "" if found <= KL_TOLERANCE else remedy)


def check_rewards(subject: Subject) -> Finding:
    """Fills of the same input are not all worth the same, or there is nothing to learn from."""
    run, config = subject.run, subject.config
    sampling = replace(run.source.sampling, seed=config.seed)
    with sharding.gathered(run.policy):
        groups = run.source.run(subject.prompts, max(2, config.group_size), sampling)
    scored = [group.rewards for group in groups if group.rewards]
    varied = sum(max(rewards) - min(rewards) > SPREAD for rewards in scored)
    figure = f"the rewards of {varied} of {len(scored)} groups vary"
    if varied > 0:
        return Finding(True, figure, "one at least", values={"varied": float(varied)})
    remedy = "raise sampling.temperature or the share of masked tokens, or take another judge"
    return Finding(False, figure, "one at least", remedy, {"varied": 0.0})
