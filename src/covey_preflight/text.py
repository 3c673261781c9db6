"""Check text: round trips, chat template, lengths, gold answers, rewards."""

import json
import logging
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace

from covey.engine.fake import FakeEngine
from covey.engine.native.cache import budget
from covey.engine.native.runner import cache_shape
from covey.environments.base import Environment, ends_with_assistant, naming, text_of, with_content
from covey.environments.settings import CustomConfig, MixtureConfig
from covey.policy.models.saved import num_rows
from covey.policy.models.text import special_ids
from covey.policy.own_tokenizer import OwnTokenizer
from covey.policy.policy import Policy, original_lengths
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.group_checks import stop_where_only_failures
from covey.system import collectives
from covey.types import Group, Message, Prompt, Rollout, RunStopped, Sampling
from covey_preflight.subject import Check, PreflightContext

LOGGER = logging.getLogger(__name__)

MANY_UNNAMED = 0.01
"""Share of rows without a token that is worth a line of the log. Qwen2.5 has 271 of 151,936."""


def check_tokenizer(subject: PreflightContext) -> Check:
    """Check prompts in the chat template, embeddings, and end tokens.

    A tokenizer that changes blanks, case or marks, or lacks letters, is reported in one line: rewards see the text as
    written.
    """
    policy = subject.run.policy
    faults = [
        *_token_faults(policy),
        *_rowless_faults(subject),
        *(fault for prompt in subject.prompts for fault in _prompt_faults(policy, prompt)),
    ]
    if faults:
        return Check(False, faults[0][0], "no difference", faults[0][1])
    remarks = [remark for prompt in subject.prompts for remark in _remarks(policy, prompt)]
    unnamed, rows = _num_unnamed(policy), num_rows(policy.causal_lm)
    spare = f"{unnamed:,} of {rows:,} rows of the embedding stand for no token, and are drawn as others are"
    if collectives.is_main_process():
        for remark in [*remarks[:1], *([spare] if unnamed > MANY_UNNAMED * rows else [])]:
            LOGGER.warning("%s", remark)
    figure = remarks[0] if remarks else f"{len(subject.prompts)} prompts come back unchanged"
    values = {"num_changed": float(len(remarks)), "num_unnamed_rows": float(unnamed)}
    return Check(True, f"{figure}; {spare}" if unnamed else figure, "", values=values)


Fault = tuple[str, str]
"""Fault and remedy."""


def _token_faults(policy: Policy) -> Iterator[Fault]:
    """Yield the policy's missing tokens: end, or mask."""
    size, other = num_rows(policy.causal_lm), "take the tokenizer that belongs to the model"
    if policy.mask_id is not None:  # it ends by length
        return
    if not policy.stop_ids and not isinstance(policy.tokenizer, OwnTokenizer):
        yield (
            "the policy knows no stop token (eos_token of the tokenizer or of the generation config)",
            "name one: eos_token in tokenizer_config.json, or eos_token_id in generation_config.json of model.name",
        )
    for token_id in sorted(policy.stop_ids):
        if token_id >= size:
            yield f"stop token {token_id} has no embedding, there are {size}", other
        left = str(policy.tokenizer.decode([token_id], skip_special_tokens=True))
        if left.strip():
            figure = f"stop token {token_id} is not marked as special, so {left!r} stays in the text that is judged"
            yield figure, 'mark it: "special": true in tokenizer.json'


def _rowless_faults(subject: PreflightContext) -> Iterator[Fault]:
    """Yield prompts with tokens that have no embedding."""
    policy, size = subject.run.policy, num_rows(subject.run.policy.causal_lm)
    rowless = [token for token, token_id in policy.tokenizer.get_vocab().items() if token_id >= size]
    for prompt in subject.all_prompts if rowless else ():
        said = [prompt.text] if isinstance(prompt.text, str) else [text_of(message) for message in prompt.text]
        for token in rowless:
            if any(token in text for text in said):
                figure = f"prompt {prompt.id} holds {token}, a token without an embedding: there are {size} rows"
                figure += f" for {len(policy.tokenizer)} tokens"
                yield figure, "resize_token_embeddings of the model, and save it"
                return


def _num_unnamed(policy: Policy) -> int:
    """Count the embedding's padding rows."""
    rows = num_rows(policy.causal_lm)
    return rows - sum(token_id < rows for token_id in policy.tokenizer.get_vocab().values())


def _prompt_faults(policy: Policy, prompt: Prompt) -> Iterator[Fault]:
    """Yield the faults of tokenizer and chat template on a prompt."""
    if policy.tokenizer.chat_template is None and not isinstance(prompt.text, str):
        found = f"prompt {prompt.id} holds messages, but the model's tokenizer has no chat template"
        yield found, "take a chat model, or prompts that are text"
        return
    for fault in _rendering_faults(policy, prompt):
        yield fault, "take another tokenizer or template, or fix the prompt"


def _rendering_faults(policy: Policy, prompt: Prompt) -> Iterator[str]:
    try:
        ids = encode_prompt(policy.tokenizer, prompt)
    except Exception as error:  # the template is foreign code: Jinja, with errors of its own making
        raised = "" if isinstance(error, ValueError) else f"the chat template raises {type(error).__name__}: "
        said = f"{raised}{error}"
        yield said if prompt.id in said else f"prompt {prompt.id}: {said}"
        return
    if policy.mask_id is not None and policy.mask_id not in ids:
        yield f"prompt {prompt.id} has no masked token ({policy.tokenizer.mask_token})"
    if encode_prompt(policy.tokenizer, prompt) != ids:
        yield f"prompt {prompt.id} gives other tokens the second time"
    if max(ids) >= num_rows(policy.causal_lm):
        yield f"token {max(ids)} of prompt {prompt.id} has no embedding, there are {num_rows(policy.causal_lm)}"
    if not isinstance(prompt.text, str):
        yield from _template_faults(policy, prompt.id, prompt.text, ids)


def _template_faults(policy: Policy, name: str, messages: Sequence[Message], ids: Sequence[int]) -> Iterator[str]:
    """Yield faults unless words are kept and only the opening is added."""
    # With the generation prompt, earlier tokens must stay as they are: turns share them as a prefix
    conversation = [with_content(message) for message in messages]
    closed = list(policy.tokenizer.apply_chat_template(conversation, add_generation_prompt=False, return_dict=False))
    if not ends_with_assistant(messages) and list(ids[: len(closed)]) != closed:
        yield f"prompt {name}: its tokens change before the end with add_generation_prompt"
    # Messages that a template drops are lost on the policy
    rendered = _render(policy, messages)
    for message in messages:
        words = text_of(message).strip()  # which a template may write as JSON
        written = (words, json.dumps(words)[1:-1], json.dumps(words, ensure_ascii=False)[1:-1])
        if message["role"] != "assistant" and not any(one in rendered for one in written):
            yield f"prompt {name}: the chat template drops what the {message['role']} says"


def _render(policy: Policy, messages: Sequence[Message]) -> str:
    goes_on, conversation = ends_with_assistant(messages), [with_content(message) for message in messages]
    render = policy.tokenizer.apply_chat_template
    return str(render(conversation, add_generation_prompt=not goes_on, continue_final_message=goes_on, tokenize=False))


def _remarks(policy: Policy, prompt: Prompt) -> Iterator[str]:
    """Yield texts that a policy reads otherwise than written.

    Composed characters and leading blanks count as equal. Tokenizers of masked policies may be lossy where their tokens
    come back.
    """
    encode = policy.tokenizer
    ids, given = encode_prompt(encode, prompt), prompt.text
    if isinstance(given, str):
        ids = list(encode(given, add_special_tokens=False)["input_ids"])
    else:
        given = _render(policy, given)
    back = _decode(policy, ids)
    given, back = (unicodedata.normalize("NFC", text.lstrip()) for text in (given, back))
    comes_back = policy.mask_id is not None and list(encode(back, add_special_tokens=False)["input_ids"]) == ids
    if given == back or comes_back:
        return
    read = f"prompt {prompt.id}: the policy reads {_around(back, given)} where {_around(given, back)} is written"
    if _has_letters_of(back, given):
        yield f"{read}; its tokenizer changes blanks, case or marks, and rewards see what is written"
    else:
        yield f"{read}; its tokenizer has no token for these letters, so it is trained without seeing them"


def _has_letters_of(back: str, given: str) -> bool:
    """Return True if all letters remain in order, in any case."""
    seen, wanted = (
        [c for c in unicodedata.normalize("NFKD", text).casefold() if unicodedata.category(c)[0] not in "ZCM"]
        for text in (back, given)
    )
    rest = iter(seen)
    return all(letter in rest for letter in wanted)


def _around(text: str, other: str) -> str:
    """Quote a text around its first difference to another."""
    place = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return repr(text[max(0, place - 10) : place + 20])


def _decode(policy: Policy, ids: Sequence[int]) -> str:
    return str(policy.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_completions(subject: PreflightContext) -> Check:
    """Check that sampled text is judged, without special tokens. A stop ends a completion, and only its end."""
    if subject.config.engine.name == "fake":
        return Check(True, "engine=fake samples from a script, not from the policy", "", applies=False)
    rollouts = [(group.prompt, rollout) for group in subject.groups for rollout in group.rollouts]
    failures = [f"prompt {g.prompt.id}: {failure.reason}" for g in subject.groups for failure in g.failures]
    faults = [(reason, "look at the engine's settings") for reason in failures]
    faults += [fault for prompt, rollout in rollouts for fault in _completion_faults(subject, prompt, rollout)]
    if faults:
        figure, remedy = faults[0]
        return Check(False, figure, "no difference", remedy)
    num_stopped = sum(rollout.finish_reason == "stop" for _, rollout in rollouts)
    figure = f"{len(rollouts)} completions read as they were sampled, {num_stopped} of them ended by a stop"
    return Check(True, figure, "no difference", values={"num_stopped": num_stopped})


def _completion_faults(subject: PreflightContext, prompt: Prompt, rollout: Rollout) -> Iterator[Fault]:
    """Yield the faults of a completion's text or end."""
    policy, where = subject.run.policy, f"a completion of prompt {prompt.id}"
    ids, special = _written_ids(rollout), special_ids(policy)
    plain = str(policy.tokenizer.decode([token_id for token_id in ids if token_id not in special]))
    if plain != rollout.text:
        figure = f"{where} is judged as {_around(rollout.text, plain)}, its tokens that are not special read "
        remedy = "take another tokenizer: its decode(skip_special_tokens=True) drops or changes other tokens too"
        yield figure + _around(plain, rollout.text), remedy
    if policy.mask_id is not None:
        return
    if set(ids[:-1]) & policy.stop_ids:
        yield f"{where} goes on after a stop token", "look at eos_token_id of the model's generation config"
    by_text = any(stop in _decode(policy, ids) for stop in subject.config.sampling.stop)
    if rollout.finish_reason == "stop" and ids[-1] not in policy.stop_ids and not by_text:
        yield f"{where} ended without a stop token", "look at sampling.stop"


def _written_ids(rollout: Rollout) -> list[int]:
    """Return the completion's tokens in the text's order."""
    length = rollout.input_length or len(rollout.target_ids)
    places = [index for index, chosen in enumerate(rollout.loss_mask) if chosen]
    return [rollout.target_ids[index] for index in sorted(places, key=lambda index: index % length)]


def check_lengths(subject: PreflightContext) -> Check:
    """Check that the longest prompt and completion fit positions and cache."""
    policy, sampling = subject.run.policy, subject.run.source.sampling
    prompt, num_tokens = subject.longest[0], len(subject.longest[1])
    max_tokens = sampling.room(num_tokens) if policy.mask_id is None else sampling.max_tokens
    if max_tokens < 1:
        figure = f"prompt {prompt.id} has {num_tokens:,} tokens and leaves no room for an answer"
        remedy = "raise sampling.max_total_tokens, or leave long prompts out of the data: data.bad_rows=skip"
        return Check(False, figure, f"sampling.max_total_tokens={sampling.max_total_tokens}", remedy)
    needed = policy.num_positions(num_tokens, max_tokens)
    limit, setting = _room(subject)
    figure = f"prompt {prompt.id} has {num_tokens:,} tokens"
    if needed > num_tokens:
        figure += f", {needed:,} with sampling.max_tokens={max_tokens}"
    values = {"longest_prompt": float(num_tokens), "needed": float(needed)}
    if needed <= min(limit, policy.max_length):
        return Check(True, figure, f"{min(limit, policy.max_length):,} tokens", values=values)
    if needed > policy.max_length:
        remedy = "lower sampling.max_tokens, or leave long prompts out of the data"
        if subject.config.data.path is not None:
            remedy += ": data.bad_rows=skip does"
        longrope = original_lengths(policy.causal_lm.config.get_text_config(decoder=True))
        why = ", beyond which longrope changes the numbers of a whole batch" if longrope else ""
        return Check(False, figure, f"{policy.max_length:,} positions of the policy{why}", remedy, values)
    return Check(False, figure, f"{limit:,} cached tokens", f"raise {setting}", values)


def _room(subject: PreflightContext) -> tuple[int, str]:
    """Return the engine's room for one completion, and its setting."""
    engine = subject.config.engine
    if engine.name not in ("native", "transformers", "vllm"):
        return subject.run.policy.max_length, ""
    policy = subject.run.policy
    return cache_shape(policy).max_slots(budget(engine.cache_bytes, policy.device)), "engine.cache_bytes"


def check_gold(subject: PreflightContext) -> Check:
    """Check that the environment's gold answers get the maximum reward."""
    environment = subject.run.environment
    with naming(environment, "gold"):
        golds = [(prompt, environment.gold(prompt)) for prompt in subject.prompts]
    verdicts = [(prompt, _score(subject, prompt, gold)) for prompt, gold in golds if gold is not None]
    if not verdicts:
        return Check(True, f"environment={subject.config.environment.name} has no gold answers", "", applies=False)
    full = subject.config.evaluation.correct_above
    low = [(p, said) for p, said in verdicts if isinstance(said, str) or said < full]
    values = {"num_gold": float(len(verdicts)), "num_low": float(len(low))}
    if not low:
        return Check(True, f"{len(verdicts)} gold answers get the maximum reward", f">= {full:g}", values=values)
    prompt, said = low[0]
    shown = said if isinstance(said, str) else f"reward {said:g}"
    figure = f"{len(low)} of {len(verdicts)} gold answers score below {full:g}, first: prompt {prompt.id}, {shown}"
    remedy = "fix the row or the reward, or set evaluation.correct_above to what a right answer gets"
    return Check(False, figure, f">= {full:g}", remedy, values)


def _score(subject: PreflightContext, prompt: Prompt, gold: str) -> float | str:
    """Return the gold answer's reward, or why it has none."""
    policy = subject.run.policy
    ids = list(policy.tokenizer(gold, add_special_tokens=False)["input_ids"])
    ids += sorted(policy.stop_ids)[: int(policy.mask_id is None)]
    found = judge_completions(subject, subject.run.environment, prompt, [ids])
    return found if isinstance(found, str) else found.rewards[0]


def judge_completions(
    subject: PreflightContext, environment: Environment, prompt: Prompt, written: Sequence[Sequence[int]]
) -> Group | str:
    """Return these completions with rewards, or why none could be scored."""
    source = subject.run.local
    engine = FakeEngine(lambda prompt_ids, sample_index: written[sample_index], len(subject.run.policy.tokenizer))
    looking = replace(source, sampler=replace(source.sampler, engine=engine, environment=environment))
    try:
        (group,) = looking.run([prompt], len(written), Sampling(max_tokens=max(map(len, written)) + 1))
        stop_where_only_failures([group])
    except RunStopped as error:
        return str(error)
    return group


def check_functions(subject: PreflightContext) -> Check:
    """Check that the user's rewards or environment score sampled completions."""
    groups = {group.prompt.environment: group for group in reversed(subject.groups) if group.rollouts}
    found = [(trial_of(subject, group.prompt), group.rollouts) for group in groups.values()]
    trials = [(trial, rollouts) for trial, rollouts in found if trial is not None]
    if not trials:
        return Check(True, "no reward functions", "", applies=False)
    said = [
        judge_completions(subject, *trial, [_written_ids(rollout) for rollout in rollouts])
        for trial, rollouts in trials
    ]
    for fault, ((judge, _), _) in zip(said, trials, strict=True):
        if isinstance(fault, str):
            is_own = judge is subject.run.environment
            return Check(False, fault, "", "fix the environment" if is_own else "fix the function or the rows")
    num_scored = sum(len(found.rollouts) for found in said if not isinstance(found, str))
    num_tried = sum(len(rollouts) for _, rollouts in trials)
    return Check(True, f"{num_scored} of {num_tried} completions get a reward", "a reward for at least one completion")


def trial_of(subject: PreflightContext, prompt: Prompt) -> tuple[Environment, Prompt] | None:
    """Return the environment to try the user's code, and its prompt.

    The user's environment is tried as it is, and its metrics are dropped. None without user code.
    """
    environment, settings = subject.run.environment, subject.config.environment
    own = settings.parts.get(prompt.environment) if isinstance(settings, MixtureConfig) else settings
    is_custom = isinstance(own, CustomConfig)
    return environment.dry_run(prompt) or ((environment, prompt) if is_custom else None)
