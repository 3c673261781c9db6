"""Checks of a masked policy's run, after the infill document.

The other checks measure loading, masked tokens, and agreement of engine and trainer.
"""

from dataclasses import replace

from covey.policy import sharding
from covey.policy.logprobs import Scoring, exact_kl, score_tokens
from covey.policy.policy import inference
from covey.policy.reference import Reference
from covey.trainer.forward import REFERENCE, ScoringContext, objective_inputs, score_frozen
from covey_preflight.policy import whole_batch
from covey_preflight.subject import Check, PreflightContext

KL_TOLERANCE = 1e-5
"""Nats per token between a policy and the reference it is equal to."""
SPREAD = 1e-9
"""Rewards closer than this are the same."""


def check_frozen(subject: PreflightContext) -> Check:
    """Check that reference and judge have nothing to train."""
    reference, environment = subject.run.trainer.reference, subject.run.environment
    # A reference under LoRA is the policy without adapters, and needs no freezing
    faults = []
    if isinstance(reference, Reference) and reference.policy.model is not subject.run.policy.model:
        faults += ["the reference" for p in reference.policy.model.parameters() if p.requires_grad][:1]
    judge = environment.judge_summary()
    if judge is not None and not judge.is_frozen:
        faults.append("the judge")
    names = [name for name, there in (("reference", reference), ("judge", judge is not None)) if there]
    if faults:
        return Check(False, f"{faults[0]} has weights that would be trained", "none", "freeze it")
    return Check(True, f"{' and '.join(names) or 'neither reference nor judge'} frozen", "nothing trained")


def check_kl(subject: PreflightContext) -> Check:
    """Check that the KL to the reference begins at 0."""
    run, config = subject.run, subject.config
    reference, objective = run.trainer.reference, run.trainer.objective
    if reference is None or not objective.kl.active:
        return Check(True, "no KL to a reference", "", applies=False)
    if config.algorithm.reference_model is not None:
        return Check(True, "the reference is a model of its own", "", applies=False)
    scoring = Scoring.of(run.policy, run.source.sampling, config.logprob_chunk)
    forward = ScoringContext(run.policy, reference, objective, scoring)
    found = 0.0
    for micro_batch in whole_batch(subject).micro_batches:
        prepared = score_frozen(forward, micro_batch, several=False, keep_old=False)
        with inference(run.policy.model):
            compared = {}
            if isinstance(reference, Reference) and objective.needs_full_kl:
                compared[REFERENCE] = exact_kl(reference)
            scores = score_tokens(run.policy, micro_batch, scoring, prepared.kept, compared)
        kl_NT = objective.kl_values(objective_inputs(prepared, scores))
        found = max(found, float(kl_NT.abs().max()))
    remedy = "the reference is not the policy that is trained: look at model and cold_start"
    figure = f"KL to the reference is {found:.2g} nats on a token at most, before any update"
    return Check(found <= KL_TOLERANCE, figure, f"{KL_TOLERANCE:g}", "" if found <= KL_TOLERANCE else remedy)


def check_rewards(subject: PreflightContext) -> Check:
    """Check that fills of one input differ in reward."""
    run, config = subject.run, subject.config
    sampling = replace(run.source.sampling, seed=config.seed)
    with sharding.gather_weights(run.policy):
        groups = run.local.run(subject.prompts, max(2, config.group_size), sampling)
    scored = [group.rewards for group in groups if group.rewards]
    # Groups whose rewards are all equal have advantage 0
    varied = sum(max(rewards) - min(rewards) > SPREAD for rewards in scored)
    figure = f"the rewards of {varied} of {len(scored)} groups vary"
    if varied > 0:
        return Check(True, figure, "one at least", values={"varied": float(varied)})
    remedy = "raise sampling.temperature or the share of masked tokens, or take another judge"
    return Check(False, figure, "one at least", remedy, {"varied": 0.0})
