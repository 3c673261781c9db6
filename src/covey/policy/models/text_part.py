"""Train the text of models that also read pictures.

The rest is frozen, and the whole is saved as the class it came as.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TEMPLATE = "chat_template.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", TEMPLATE)
"""Files that a processor of pictures reads beside the tokenizer's."""


def auto_class(kind: str, config: "PreTrainedConfig | None" = None) -> Any:
    """Return transformers' loader of the class that a model was saved as.

    A configuration of text and pictures may belong to the whole model, or to its text part alone.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForMultimodalLM

    if kind == "masked":
        return AutoModelForMaskedLM
    whole: Any = AutoModelForMultimodalLM._model_mapping
    text: Any = AutoModelForCausalLM._model_mapping
    if config is not None and type(config) not in text:
        _register_saved_class(config)
    if config is None or type(config) not in whole or config.is_encoder_decoder:
        return AutoModelForCausalLM
    is_whole = type(config) not in text or whole[type(config)].__name__ in (config.architectures or ())
    return AutoModelForMultimodalLM if is_whole else AutoModelForCausalLM


def _register_saved_class(config: "PreTrainedConfig") -> None:
    """Tell transformers the class of a text part.

    It names Emu3's and Mllama's for the whole model alone.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    for name in {*(config.architectures or ())} & {*KNOWN.values()}:
        own: Any = getattr(transformers, name)
        if own.config_class is type(config):
            transformers.AutoModelForCausalLM.register(type(config), own, exist_ok=True)


def is_composite(model: "PreTrainedModel") -> bool:
    """Return True for a model of more than text."""
    return model.config.get_text_config(decoder=True) is not model.config


def beside_text(model: "PreTrainedModel") -> frozenset[str]:
    """Name the weights that text never meets: those of towers and projectors."""
    if not is_composite(model):
        return frozenset()
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    own = {id(weight) for part in parts if part is not None for weight in part.parameters()}
    inner = {id(weight) for weight in model.base_model.parameters()}
    return frozenset(name for name, weight in model.named_parameters() if id(weight) in inner - own)


def read_processor(name: str, revision: str | None, files: Sequence[str] = PROCESSOR_FILES) -> Mapping[str, bytes]:
    """Read a processor's files from a folder or the hub."""
    from transformers.utils.hub import cached_file

    found: dict[str, bytes] = {}
    for file in files:
        with suppress(OSError):  # a name that is none, as of a model in memory
            path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
            found |= {} if path is None else {file: Path(path).read_bytes()}
    return found


def hear_text(
    tokenizer: "PreTrainedTokenizerBase", name: str = "", revision: str | None = None
) -> "PreTrainedTokenizerBase":
    """Let the tokenizer's chat template read strings.

    Without one, the template of the processor of `name` is taken. Some read lists of parts alone, and would leave a
    string out without a word.
    """
    if tokenizer.chat_template is None and name and (found := read_processor(name, revision, (TEMPLATE,))):
        tokenizer.chat_template = json.loads(found[TEMPLATE])["chat_template"]

    def heard(template: str) -> str:
        is_deaf = not _is_heard(tokenizer, template, SECRET) and _is_heard(tokenizer, template, [_part(SECRET)])
        return IN_PARTS + template if is_deaf else template

    change_templates(tokenizer, heard)
    return tokenizer


def change_templates(tokenizer: "PreTrainedTokenizerBase", change: Callable[[str], str]) -> None:
    """Change the chat template, or each of several named ones."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {name: change(each) for name, each in template.items()}
    elif template is not None:
        tokenizer.chat_template = change(template)


def _is_heard(tokenizer: "PreTrainedTokenizerBase", template: str, content: object) -> bool:
    messages: list[Any] = [{"role": "user", "content": content}]
    try:
        return SECRET in tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # a foreign program
        return False


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


SECRET = "h8n3k5"
"""A word that no template writes of itself."""
IN_PARTS = (
    "{%- set heard = namespace(messages=[]) -%}{%- for message in messages -%}{%- if message['content'] is string -%}"
    "{%- set parts = [{'type': 'text', 'text': message['content']}] -%}"
    "{%- set heard.messages = heard.messages + [dict(message, content=parts)] -%}"
    "{%- else -%}{%- set heard.messages = heard.messages + [message] -%}{%- endif -%}{%- endfor -%}"
    "{%- set messages = heard.messages -%}"
)
"""The beginning of a template that makes parts of strings."""
