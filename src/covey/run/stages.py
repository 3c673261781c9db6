"""The stages around the loop: build, resume, evaluate, save."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from covey.cluster.ending import Ending
from covey.cluster.source import RaySource
from covey.config.engine_choice import obstacle_to_vllm, this_machine
from covey.config.schema import Config
from covey.environments.base import Environment, facts_of
from covey.policy import sharding
from covey.policy.attention.choice import varlen_obstacle
from covey.policy.kernels.gpu.liger import LIGER
from covey.policy.kernels.layers import compiled_class
from covey.policy.models.adapters import BASE
from covey.policy.models.naming import COLD_START, COLD_START_REPORT
from covey.policy.policy import Policy
from covey.policy.reference import Reference, refresh_reference
from covey.policy.settings import chooses_liger
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.saved.journal import RolloutJournal
from covey.rollouts.stream import PromptStream
from covey.run import cold_start
from covey.run.build import Run, build_run
from covey.run.build_stream import longest_prompt
from covey.run.checkpoints import fingerprint
from covey.run.checkpoints.checkpoint import load_state, load_weights, read_manifest
from covey.run.checkpoints.manifest import step_of
from covey.run.checkpoints.resume import changed_facts, check_same_reference, cut_rows, resume_hint, resume_point
from covey.run.evaluate import answer, noise
from covey.run.folder import JOURNAL
from covey.run.given import NO_OBJECTS, RunObjects
from covey.run.records.facts import changed_code, code_of
from covey.run.records.record import RunRecorder
from covey.run.records.waits import make_watchdog
from covey.run.state import checkpoint_state, restore
from covey.system import collectives, ranks
from covey.system.disk import WriteError
from covey.system.lookup import resolve
from covey.system.machine import release_memory
from covey.system.text.format import count, number_of, percent
from covey.system.waits.signals import Stopper, StopRequested

LOGGER = logging.getLogger(__name__)


def make_stopper(config: Config) -> Stopper:
    """Build the stopper, which stops all ranks together."""
    together = collectives.all_max_int if ranks.world_size() > 1 else None
    return Stopper(config.output.shutdown_timeout, together)


def find_checkpoint(config: Config, output_dir: Path) -> Path | None:
    """Return the verified checkpoint to resume from, None for a new run."""
    if config.resume is None:
        return None
    waiting_for = f"the checkpoints of {output_dir} to be verified"
    with make_watchdog(config.timeouts, output_dir) as watchdog, watchdog.deadline(waiting_for, "timeouts.loading"):
        return collectives.run_on_rank0(lambda: resume_point(config, output_dir))


@contextmanager
def report_interruption(record: RunRecorder) -> Iterator[None]:
    """Print the resume command on interruption or a full disk."""
    try:
        yield
    except StopRequested:
        record.say(resume_hint(record.folder))
        raise
    except WriteError as error:
        raise WriteError(f"{error}; {resume_hint(record.folder)}") from error


def load_environment(config: Config, record: RunRecorder, given: RunObjects = NO_OBJECTS) -> Environment:
    """Build the environment, and report on its judges."""
    phase = record.timer.phase("judge") if config.environment.learned_judge == "trained" else nullcontext()
    with record.watchdog.deadline("the environment to be made, with its data", "timeouts.loading"), phase:
        environment = given.build_environment(config, record.say)
    judge = environment.judge_summary()
    if judge is not None:
        record.say(judge.summary_line)
    return environment


def run_cold_start(
    config: Config,
    environment: Environment,
    record: RunRecorder,
    checkpoint: Path | None = None,
    heed: Callable[[], None] = lambda: None,
) -> Path | None:
    """Return the policy that a cold start made, None without one.

    A resumed run takes the one that it began with, where that is kept: its settings may make another one now. `heed`
    is called at each look at the accuracy, where ranks can stop together.
    """

    def say(text: str) -> None:
        record.say(text)
        heed()

    if checkpoint is not None and (began := began_with(config, record.folder, checkpoint)) is not None:
        return began
    if not config.cold_start.enabled:
        return None
    waiting = record.watchdog.deadline("the cold start", "timeouts.cold_start")
    with record.timer.phase("cold_start"), waiting:
        try:
            start = cold_start.ensure(config, environment, say)
        except StopRequested:
            record.say("interrupted during the cold start; it is not saved until finished and will restart")
            raise
    record.say(f"cold start: {start.summary_line}")
    return start.path


def began_with(config: Config, folder: Path, checkpoint: Path) -> Path | None:
    """Return a run's initial policy: base model or cold start. None where neither the folder nor the cache has it."""
    base = folder / BASE
    kept = Path(config.cold_start.cache_dir, Path(read_manifest(checkpoint).get("reference", "")).name)
    if config.model.lora_rank > 0 and collectives.run_on_rank0(base.is_dir):
        return base
    is_kept = kept.name.startswith(COLD_START) and collectives.run_on_rank0((kept / COLD_START_REPORT).is_file)
    return kept if is_kept else None


def load_run(
    config: Config,
    environment: Environment,
    record: RunRecorder,
    prompts: str = "",
    given: RunObjects = NO_OBJECTS,
    began: Path | None = None,
) -> Run:
    """Load the model, and build the run around it. `prompts` is the fingerprint that checkpoints carry."""
    with record.watchdog.deadline(f"the model {began or config.model.name} to be loaded", "timeouts.loading"):
        run = build_run(config, environment, record.timer, given.policy(config), given.compared, began)
    run = replace(run, code=code_of(run, given.code))  # before a file of it changes
    record.begin(run, prompts)
    facts_of(environment)  # refused here, and not at the first checkpoint
    return run


def announce(run: Run, record: RunRecorder) -> None:
    """Report the training, and warn of repeated prompts and of low rates."""
    record.say(opening(run))
    if run.policy.device.type == "cuda":
        record.say(computing(run.policy, run.config))
    for line in doubts(run) if collectives.is_main_process() else ():
        LOGGER.warning("%s", line)


PREFLIGHT = "covey_preflight.preflight:before_training"
"""The checks of a package beside covey, on while `preflight.enabled`."""


def run_preflight(run: Run, record: RunRecorder) -> None:
    """Check a new run before its first step. ValueError for a failure."""
    if run.config.preflight.enabled:
        resolve(PREFLIGHT, {})(run, record)


def open_journal(run: Run, record: RunRecorder, prompts: str, checkpoint: Path | None) -> None:
    """Open the journal of the steps after a checkpoint."""
    if not run.config.output.journal:
        return
    identity = fingerprint.run_identity(prompts, asdict(run.config) | {"code": run.code})
    vocabulary = int(run.policy.causal_lm.config.get_text_config(decoder=True).vocab_size)
    place, step = (collectives.rank(), collectives.world_size()), checkpoint and step_of(checkpoint)
    waits = run.config.output.on_write_error == "continue"
    record.journal = RolloutJournal(record.folder / JOURNAL, identity, vocabulary, place, step=step or 0, wait=waits)
    run.source.keep_in(record.journal)
    if record.journal.found:
        record.say(record.journal.found)


def resume(run: Run, record: RunRecorder, checkpoint: Path) -> int:
    """Load a checkpoint into the run; return its finished steps."""
    with record.watchdog.deadline(f"{checkpoint} to be read", "timeouts.loading"):
        step = load_checkpoint(run, record, checkpoint)
        # Not before: a run that cannot go on keeps the rows it had
        collectives.run_on_rank0(lambda: cut_rows(record.folder, checkpoint))
    run.source.follow(step, run.config.num_steps)  # before anything is sampled
    run.source.publish(step)
    record.say(f"resumed after step {step} from {checkpoint}")
    for change in changed_facts(checkpoint, run.code.get("model", {})):
        LOGGER.warning("%s: the run is no longer bit-for-bit reproducible", change)
    for name, files in changed_code(read_manifest(checkpoint).get("user_code"), run.code).items():
        LOGGER.warning(
            "%s is not the one that step %d was saved with (%s changed): %s before and after it are not comparable",
            *(name, step, ", ".join(files), "rewards" if name.startswith(("rewards", "environment")) else "steps"),
        )
    return step


def load_checkpoint(run: Run, record: RunRecorder, checkpoint: Path) -> int:
    """Load state and weights; return the finished steps. ValueError for another reference."""
    if run.trainer.reference is not None:
        collectives.run_on_rank0(lambda: check_same_reference(run.config, checkpoint, run.reference_identity))
    state = load_state(checkpoint)
    check_keeps_reference(run, state["trainer"]["reference"])
    load_weights(run.policy, checkpoint)
    return restore(run, record, state)


def check_keeps_reference(run: Run, refreshed: Mapping[str, Tensor]) -> None:
    """Refuse to resume a moved reference without saving it. ValueError."""
    if refreshed and run.trainer.reference is not None and not run.trainer.algorithm.refreshes_reference:
        raise ValueError(
            "the reference of this run was refreshed, and algorithm.reference_refresh_every=null would forget it: "
            "set it above num_steps to keep the reference as it is"
        )


def stop_with_cluster(run: Run, ending: Ending) -> None:
    """Stop training if the cluster of its samplers is lost."""
    if isinstance(run.source, RaySource):
        run.source.on_loss = ending.stop_later


def await_samplers(run: Run, record: RunRecorder) -> None:
    """Wait for samplers in processes of their own to start."""
    if isinstance(run.source, RaySource):
        record.say("waiting for samplers to start")
        with record.timer.phase("samplers"):
            run.source.await_samplers()


def evaluate_and_log(run: Run, record: RunRecorder, step: int) -> None:
    """Evaluate on the held-out prompts and log the results."""
    with record.timer.phase("evaluation"), sharding.gather_weights(run.policy):
        answers = answer(run.source, run.test_prompts, run.source.sampling, run.config.evaluation)
        release_memory()
    with record.watchdog.deadline("the logs to be written", "timeouts.saving"):
        record.evaluation(step, answers)
    if step == 0 and (line := noise(answers, run.source.sampling.temperature)) is not None:
        record.say(line)
    if run.config.algorithm.reference_refresh_on_best and is_best([one.score for one in record.evaluations]):
        take_as_reference(run)
        record.say(f"the policy after step {step} is the best so far and becomes the reference")


def may_answer_first(run: Run, record: RunRecorder) -> bool:
    """Return True if the first evaluation may follow the first step's answers.

    Both are of the same weights, so training begins at once. Not where the evaluation may end the run.
    """
    return record.behind.apart and not run.config.doctor.stop_on and run.config.num_steps > 0


def is_best(scores: Sequence[float]) -> bool:
    """Return True if the last evaluation is the best."""
    *before, last = scores
    return len(before) > 0 and not math.isnan(last) and all(last > one for one in before if not math.isnan(one))


def take_as_reference(run: Run) -> None:
    """Replace the reference by the policy as it is now."""
    if isinstance(run.trainer.reference, Reference):
        refresh_reference(run.trainer.reference, run.policy, alpha=1.0)


def save(run: Run, record: RunRecorder, finished: Mapping[str, Any], stopper: Stopper, *, needed: bool = False) -> None:
    """Write a checkpoint of the last step, holding signals back."""
    stopper.hold()
    record.save(checkpoint_state(run, finished), needed=needed)
    stopper.release()


SAVE_SECONDS = 1800.0
"""Most seconds between checkpoints, but with output.save_every=0."""


def save_is_overdue(run: Run, record: RunRecorder, step: int) -> bool:
    """Return True if too much time would be lost."""
    if run.config.output.save_every == 0 or step >= run.config.num_steps:
        return False
    return collectives.run_on_rank0(lambda: time.monotonic() - record.saved_at > SAVE_SECONDS)


def opening(run: Run) -> str:
    """Describe the training in one line.

    >>> opening(run)
    'nano: 1.38M parameters, all trained in float32; 22 prompts to train on, 2 held out; 4 x 4 completions a step,
    30 steps: 5.5 passes over the prompts'
    """
    config, prompts = run.config, len(run.source.stream.prompts)
    all_held_out, looked_at = len(run.environment.prompts("test")), len(run.test_prompts)
    some = f" ({looked_at:,} of them evaluated)" if looked_at < all_held_out else ""
    held_out = f"{all_held_out:,} held out{some}" if run.is_held_out else f"none held out, {looked_at:,} looked at"
    steps = number_of(config.num_steps, "step")
    if isinstance(run.source.stream, PromptStream):  # another order has no passes
        passes = f"{config.num_steps * config.groups_per_step / prompts:.3g}"
        steps += f": {passes} pass{'' if passes == '1' else 'es'} over the prompts"
    # Rows that one forgot to name are no error there
    is_made_up = config.environment.reads_rows == "maybe" and config.data.path is None
    made_up = " made up (data.path=null)" if is_made_up and config.environment.name != "mixture" else ""
    return (
        f"{config.model.name}: {size_of(run.policy)}; "
        f"{prompts:,} prompts{made_up} to train on, {held_out}; "
        f"{config.groups_per_step:,} x {config.group_size:,} completions a step, {steps}"
    )


def computing(policy: Policy, config: Config) -> str:
    """Describe how a GPU samples and trains, with reasons.

    >>> computing(policy, config)
    'sampling: native, a graph of each step (vLLM is not installed); attention: varlen; layers: liger; activations: ...'
    """
    reason = obstacle_to_vllm(config, this_machine()) or "vLLM is installed too: engine=vllm"
    sampling = f"native, a graph of each step ({reason})" if config.engine.name == "native" else config.engine.name
    sampling = "transformers" if policy.path == "general" and config.engine.name == "native" else sampling
    obstacle = varlen_obstacle(policy.heads)
    why = (
        f" (varlen {obstacle})" if policy.attention == "sdpa" and obstacle and config.model.attention == "auto" else ""
    )
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in policy.model.modules())
    activations = "computed again" if recomputes else "kept"
    if config.model.gradient_checkpointing is None:
        activations += ", for all of them would not fit" if recomputes else ", for they fit"
    attention = OWN.get(policy.attention, policy.attention)
    training = f"attention: {attention}{why}; layers: {_layers(policy, config)}; activations: {activations}"
    return f"sampling: {sampling}; {training}"


OWN = {
    "forked": "the model's own, prompts shared through its cache",
    "rows": "the model's own, of padded rows",
    "alone": "the model's own, of single texts",
}
"""Descriptions of attention on the general path."""


def _layers(policy: Policy, config: Config) -> str:
    """Describe the kernels of norms, gates and rotary positions."""
    modules = list(policy.causal_lm.modules())
    if any(type(module) in LIGER.values() for module in modules):
        return "liger"
    would_be = any(compiled_class(module) for module in modules) and not policy.computes_whole
    is_missing = config.model.kernels == "auto" and not chooses_liger("auto", is_half=True)
    return "torch (pip install liger-kernel shortens a step)" if would_be and is_missing else "torch"


def size_of(policy: Policy) -> str:
    """Count the policy's weights and those that are trained, with the precision.

    >>> size_of(policy)
    '494M parameters, 8.80M of them trained (1.8 %) in bfloat16'
    """
    whole = policy.causal_lm.num_parameters()
    trained = policy.causal_lm.num_parameters(only_trainable=True)
    share = "all trained" if trained == whole else f"{count(trained)} of them trained ({percent(trained / whole)})"
    return f"{count(whole)} parameters, {share} in {str(policy.precision).removeprefix('torch.')}"


def doubts(run: Run) -> Iterator[str]:
    """Yield warnings of prompts drawn repeatedly or too long, of low rates."""
    prompts, groups_per_step = len(run.source.stream.prompts), run.config.groups_per_step
    if groups_per_step > prompts:
        yield (
            f"groups_per_step={groups_per_step} takes each of {prompts} training prompts "
            f"{groups_per_step / prompts:.3g} times a step; a larger group_size would compare more answers to each"
        )
    lr, rank = run.config.optimizer.lr, run.config.model.lora_rank
    if rank > 0 and lr < 5e-6 and run.config.optimizer.name != "sgd":
        yield f"optimizer.lr={lr:g} hardly moves adapters (model.lora_rank={rank}): 1e-4 to 5e-4 is usual for them"
    if not run.config.preflight.enabled and run.config.data.bad_rows == "error":  # else looked at, or left out
        yield from _too_long(run)


def _too_long(run: Run) -> Iterator[str]:
    prompt = max(run.source.stream.prompts, key=lambda prompt: len(str(prompt.text)))
    most = longest_prompt(run.config.sampling, run.policy.max_length)
    with suppress(ValueError):  # a template's refusal is told when the prompt is drawn
        num_tokens = len(encode_prompt(run.policy.tokenizer, prompt))
        if num_tokens > most and run.policy.mask_id is None:
            yield (
                f"prompt {prompt.id} has {num_tokens:,} tokens and there is room for {most:,}: it ends the run when it "
                "is drawn; data.bad_rows=skip leaves such prompts out"
            )
