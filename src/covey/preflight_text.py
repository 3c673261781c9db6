"""Checks of text on its way into tokens and back: round trips, the chat template, lengths, gold answers, rewards."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace

from covey.engine.base import Sampling
from covey.engine.fake import FakeEngine
from covey.engine.runner import cache_shape
from covey.environments.base import Environment, HasGold, RunStopped, Tries
from covey.policy.policy import Policy
from covey.preflight_types import Finding, Subject, vocabulary_size
from covey.rollout import encode_prompt
from covey.types import Group, Message, Prompt, Rollout

# ------------------------------------------------------------------------------------------------ tokenizer


def check_tokenizer(subject: Subject) -> Finding:
    """Every prompt survives tokenizer and chat template, and there is a token that ends a completion."""
    policy = subject.run.policy
    faults = [
        *_token_faults(policy),
        *(fault for prompt in subject.prompts for fault in _prompt_faults(policy, prompt)),
    ]
    if faults:
        return Finding(False, faults[0], "no difference", "take another tokenizer or template, or mend the prompt")
    return Finding(True, f"{len(subject.prompts)} prompts come back unchanged", "no difference")


def _token_faults(policy: Policy) -> Iterator[str]:
    """What a policy of its kind cannot do without: a token that ends a completion, or one that is filled in."""
    size = vocabulary_size(policy)
    if policy.mask_id is not None:
        if policy.mask_id >= size:
            yield f"mask token {policy.mask_id} has no embedding, there are {size}"
        return
    if not policy.stop_ids:
        yield "the policy knows no stop token (eos_token of the tokenizer or of the generation config)"
    for token_id in sorted(policy.stop_ids):
        if token_id >= size:
            yield f"stop token {token_id} has no embedding, there are {size}"
        left = str(policy.tokenizer.decode([token_id], skip_special_tokens=True))
        if left.strip():
            yield f"stop token {token_id} is not marked as special, so {left!r} stays in the text that is judged"


def _prompt_faults(policy: Policy, prompt: Prompt) -> Iterator[str]:
    try:
        ids = encode_prompt(policy.tokenizer, prompt)
    except ValueError as error:
        yield str(error)
        return
    except Exception as error:  # the template is foreign code: Jinja, with errors of its own making
        yield f"prompt {prompt.id}: the chat template raises {type(error).__name__}: {error}"
        return
    if policy.mask_id is not None and policy.mask_id not in ids:
        yield f"prompt {prompt.id} has no masked token ({policy.tokenizer.mask_token})"
    if encode_prompt(policy.tokenizer, prompt) != ids:
        yield f"prompt {prompt.id} gives other tokens the second time"
    if max(ids) >= vocabulary_size(policy):
        yield f"token {max(ids)} of prompt {prompt.id} has no embedding, there are {vocabulary_size(policy)}"
    if isinstance(prompt.text, str):
        yield from _text_faults(policy, prompt.id, prompt.text, ids)
    else:
        yield from _template_faults(policy, prompt.id, prompt.text, ids)


def _text_faults(policy: Policy, name: str, text: str, ids: Sequence[int]) -> Iterator[str]:
    """The text's own tokens decode to it; what the tokenizer puts around them are special tokens.

    Tokenizers of masked policies may be lossy, as BERT's is about case and blanks: then its tokens come back.
    """
    own = list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
    back = _decode(policy, own)
    if policy.mask_id is None or list(policy.tokenizer(back, add_special_tokens=False)["input_ids"]) != own:
        yield from _difference(name, text, back)
    start = next((i for i in range(len(ids) - len(own) + 1) if list(ids[i : i + len(own)]) == own), None)
    around = list(ids) if start is None else [*ids[:start], *ids[start + len(own) :]]
    if start is None or set(around) - set(policy.tokenizer.all_special_ids):
        yield f"prompt {name} gets more than special tokens around it: {_decode(policy, around)!r}"


def _template_faults(policy: Policy, name: str, messages: Sequence[Message], ids: Sequence[int]) -> Iterator[str]:
    """Nobody's words are lost, and the opening of the answer is all that add_generation_prompt adds."""
    conversation = [dict(message) for message in messages]
    render = policy.tokenizer.apply_chat_template
    rendered = str(render(conversation, add_generation_prompt=True, tokenize=False))
    yield from _difference(name, rendered, _decode(policy, ids))
    closed = list(render(conversation, add_generation_prompt=False, return_dict=False))
    if list(ids[: len(closed)]) != closed:
        yield f"prompt {name}: its tokens change before the end with add_generation_prompt"
    for message in conversation:
        if message["role"] != "assistant" and message["content"].strip() not in rendered:
            yield f"prompt {name}: the chat template drops what the {message['role']} says"


def _difference(name: str, given: str, back: str) -> Iterator[str]:
    """Composed and decomposed characters are the same text; many tokenizers make them one."""
    if unicodedata.normalize("NFC", given) == unicodedata.normalize("NFC", back):
        return
    place = next((i for i, (a, b) in enumerate(zip(given, back, strict=False)) if a != b), min(len(given), len(back)))
    part = slice(max(0, place - 10), place + 20)
    yield f"prompt {name} comes back from its tokens as {back[part]!r} where it says {given[part]!r}"


def _decode(policy: Policy, ids: Sequence[int]) -> str:
    return str(policy.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# ------------------------------------------------------------------------------------------------ completions


def check_completions(subject: Subject) -> Finding:
    """What is judged is what was sampled, without special tokens; a stop ends a completion, and only its end."""
    if subject.config.engine.name == "fake":
        return Finding(True, "engine=fake samples from a script, not from the policy", "", applies=False)
    rollouts = [(group.prompt, rollout) for group in subject.groups for rollout in group.rollouts]
    faults = [f"prompt {g.prompt.id}: {failure.reason}" for g in subject.groups for failure in g.failures]
    faults += [fault for prompt, rollout in rollouts for fault in _completion_faults(subject, prompt, rollout)]
    if faults:
        remedy = "take another tokenizer (special tokens must be marked as such), or look at sampling.stop"
        return Finding(False, faults[0], "no difference", remedy)
    num_stopped = sum(rollout.finish_reason == "stop" for _, rollout in rollouts)
    figure = f"{len(rollouts)} completions read as they were sampled, {num_stopped} of them ended by a stop"
    return Finding(True, figure, "no difference", values={"num_stopped": num_stopped})


def _completion_faults(subject: Subject, prompt: Prompt, rollout: Rollout) -> Iterator[str]:
    policy, where = subject.run.policy, f"a completion of prompt {prompt.id}"
    ids = _written_ids(rollout)
    plain = [token_id for token_id in ids if token_id not in set(policy.tokenizer.all_special_ids)]
    if str(policy.tokenizer.decode(plain)) != rollout.text:
        yield f"{where} reads {rollout.text[:40]!r} without special tokens, its tokens without them are other text"
    if policy.mask_id is not None:
        return
    if set(ids[:-1]) & policy.stop_ids:
        yield f"{where} goes on after a stop token"
    by_text = any(stop in _decode(policy, ids) for stop in subject.config.sampling.stop)
    if rollout.finish_reason == "stop" and ids[-1] not in policy.stop_ids and not by_text:
        yield f"{where} ended without a stop token"


def _written_ids(rollout: Rollout) -> list[int]:
    """The tokens of the completion in the order of the text; several passes fill them in another."""
    length = rollout.input_length or len(rollout.target_ids)
    places = [index for index, chosen in enumerate(rollout.loss_mask) if chosen]
    return [rollout.target_ids[index] for index in sorted(places, key=lambda index: index % length)]


# ------------------------------------------------------------------------------------------------ lengths


def check_lengths(subject: Subject) -> Finding:
    """The longest prompt, with a whole completion, fits into the policy's positions and the engine's cache."""
    policy, max_tokens = subject.run.policy, subject.config.sampling.max_tokens
    prompt, num_tokens = subject.longest[0], len(subject.longest[1])
    needed = policy.num_positions(num_tokens, max_tokens)
    limit, setting = _room(subject)
    figure = f"prompt {prompt.id} has {num_tokens:,} tokens"
    if needed > num_tokens:
        figure += f", {needed:,} with sampling.max_tokens={max_tokens}"
    values = {"longest_prompt": float(num_tokens), "needed": float(needed)}
    if needed <= min(limit, policy.max_length):
        return Finding(True, figure, f"{min(limit, policy.max_length):,} tokens", values=values)
    if needed > policy.max_length:
        remedy = "lower sampling.max_tokens, or leave long prompts out of the data"
        return Finding(False, figure, f"{policy.max_length:,} positions of the policy", remedy, values)
    return Finding(False, figure, f"{limit:,} cached tokens", f"raise {setting}", values)


def _room(subject: Subject) -> tuple[int, str]:
    """Tokens that the engine can hold of one completion with its prompt, and the setting that decides it."""
    engine = subject.config.engine
    if engine.name != "native":
        return subject.run.policy.max_length, ""
    return cache_shape(subject.run.policy).max_slots(engine.cache_bytes), "engine.cache_bytes"


# ------------------------------------------------------------------------------------------------ gold answers


def check_gold(subject: Subject) -> Finding:
    """The environment's own gold answers, tokenized and decoded like any completion, get full marks."""
    environment = subject.run.environment
    if not isinstance(environment, HasGold):
        return Finding(True, f"environment={subject.config.environment.name} has no gold answers", "", applies=False)
    golds = [(prompt, environment.gold(prompt)) for prompt in subject.prompts]
    verdicts = [(prompt, _score(subject, prompt, gold)) for prompt, gold in golds if gold is not None]
    full = subject.config.evaluation.correct_above
    low = [(p, said) for p, said in verdicts if isinstance(said, str) or said < full]
    values = {"num_gold": float(len(verdicts)), "num_low": float(len(low))}
    if not low:
        return Finding(True, f"{len(verdicts)} gold answers score full marks", f">= {full:g}", values=values)
    prompt, said = low[0]
    shown = said if isinstance(said, str) else f"reward {said:g}"
    figure = f"{len(low)} of {len(verdicts)} gold answers score below {full:g}, first: prompt {prompt.id}, {shown}"
    remedy = "mend the row or the reward, or set evaluation.correct_above to what a right answer gets"
    return Finding(False, figure, f">= {full:g}", remedy, values)


def _score(subject: Subject, prompt: Prompt, gold: str) -> float | str:
    """The reward of the gold answer as a completion, or why it could not be scored."""
    policy = subject.run.policy
    ids = list(policy.tokenizer(gold, add_special_tokens=False)["input_ids"])
    ids += sorted(policy.stop_ids)[: int(policy.mask_id is None)]
    found = _judged(subject, subject.run.environment, prompt, [ids])
    return found if isinstance(found, str) else found.rewards[0]


def _judged(
    subject: Subject, environment: Environment, prompt: Prompt, written: Sequence[Sequence[int]]
) -> Group | str:
    """These completions with their rewards, or why none could be scored."""
    source = subject.run.source
    engine = FakeEngine(lambda prompt_ids, sample_index: written[sample_index], len(subject.run.policy.tokenizer))
    looking = replace(source, sampler=replace(source.sampler, engine=engine, environment=environment))
    try:
        (group,) = looking.run([prompt], len(written), Sampling(max_tokens=max(map(len, written)) + 1))
    except RunStopped as error:
        return str(error)
    return group


# ------------------------------------------------------------------------------------------------ reward functions


def check_functions(subject: Subject) -> Finding:
    """The user's own reward functions, called as in training, have something to say of sampled completions."""
    environment = subject.run.environment
    groups = {group.prompt.environment: group for group in reversed(subject.groups) if group.rollouts}
    tries = environment.trial if isinstance(environment, Tries) else lambda prompt: None
    trials = [(trial, group.rollouts) for group in groups.values() if (trial := tries(group.prompt)) is not None]
    if not trials:
        return Finding(True, "no reward functions", "", applies=False)
    said = [_judged(subject, *trial, [_written_ids(rollout) for rollout in rollouts]) for trial, rollouts in trials]
    faults = [found for found in said if isinstance(found, str)]
    if faults:
        return Finding(False, faults[0], "one reward at least", "mend the function, rewards or the rows")
    num_scored = sum(len(found.rollouts) for found in said if not isinstance(found, str))
    num_tried = sum(len(rollouts) for _, rollouts in trials)
    return Finding(True, f"{num_scored} of {num_tried} completions get a reward", "one reward at least")
