"""GRPOTrainer: TRL's arguments, over `covey.train`."""

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, TrainerCallback, TrainerState

from covey.api.objects import HOME, model_name, reward_entry, tool_entry
from covey.api.request import Arguments, Request, frozen_settings
from covey.api.result import Result
from covey.api.settings import make_config
from covey.api.training import run_request
from covey.config.schema import Config
from covey.environments.base import Environment, Split
from covey.environments.data.pictures import picture_in
from covey.environments.reward_functions.build import no_reward
from covey.environments.reward_functions.call import name_of
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.environments.reward_functions.rows import PromptFormat
from covey.policy.models.adapters import other_than_plain_lora
from covey.policy.models.loading import load_policy
from covey.policy.models.made import restore_buffers
from covey.policy.models.saved import check_code, code_beside, read_weights
from covey.policy.policy import DTYPES
from covey.policy.settings import FOLDER, ModelConfig
from covey.run.evaluate import Evaluation
from covey.run.folder import begun_at
from covey.run.given import RunObjects
from covey.system import ranks
from covey.system.jsonl import write_json
from covey.system.lookup import one_of
from covey.system.workers.pool import WorkerSettings
from covey_integrations.tools.episode import ToolRules
from covey_integrations.tools.rows import RowTools, with_prompt
from covey_integrations.tools.settings import ToolsConfig
from covey_trl.callbacks import Bridge, evaluation_metrics
from covey_trl.checks import check_arguments, check_kinds, check_overrides, quantised_settings
from covey_trl.config import GRPOConfig, explaining
from covey_trl.data import rows_of_reset, splits_of
from covey_trl.device_map import device_of_map
from covey_trl.fields import named_in_errors
from covey_trl.mapping import settings_of
from covey_trl.processes import Processes
from covey_trl.rewards import reward_list

REWARD_SECONDS = 600.0
"""A reward function runs in this process, as in TRL; one that takes longer for one prompt ends the run."""

MAX_TURNS = 64
"""Turns of an attempt with tools where max_tool_calling_iterations sets no limit."""


MODEL_CARD = ("model_name", "language", "license", "tags", "finetuned_from", "tasks", "dataset", "dataset_name")
"""Keywords of push_to_hub that describe a model in its card."""


class TrainOutput(NamedTuple):
    """Result of `GRPOTrainer.train`."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


PREFILLED = (
    "TRL opens a new answer behind it; end prompts with the user's message, and give answers a column of their own"
)


@explaining
class GRPOTrainer:
    """Train as a TRL script says, or refuse unsupported arguments by name.

    >>> trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=exact, args=args, train_dataset=rows)
    >>> trainer.train(), trainer.save_model()
    """

    _result: Result | None = None
    """Result of the latest finished training."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        ref_model: Any = None,
    ) -> None:
        """Read TRL's arguments. Without a train_dataset `reset` supplies the prompts.

        `ref_model`, a name or a model, is what beta compares with, where it is not the model as it began. ValueError,
        in one line, for an argument or a field of `args` that has no counterpart.
        """
        check_overrides(type(self), GRPOTrainer)
        check_kinds(model, args, processing_class, callbacks=callbacks, tools=tools, optimizers=optimizers)
        # Arguments, data and policy
        self.args = args or GRPOConfig(output_dir=f"{_short_name(model)}-GRPO")
        check_arguments(self.args, rollout_func, optimizers, ref_model)
        keywords: dict[str, Any] = dict(self.args.model_init_kwargs or {})  # type: ignore[arg-type] # JSON is read by now
        self._quantised = quantised_settings(model, quantization_config, keywords, peft_config)
        if self._quantised:
            _refuse_beside_quantised(model, processing_class, keywords)
        is_trusted = bool(keywords.pop("trust_remote_code", False)) or self.args.trust_remote_code
        has_code = is_trusted and isinstance(model, str) and bool(code_beside(model))
        self._code = {"model.code": FOLDER} if has_code else {}
        self._given = (None, None)
        if not self._quantised:
            self._given = _load(model, processing_class, peft_config, keywords, has_code)
        self._reference, self._tools, self._factories = ref_model, list(tools or ()), environment_factory
        if train_dataset is None and callable(environment_factory):
            train_dataset = rows_of_reset(self.args)
        self._splits, self._eval_names = splits_of(train_dataset, eval_dataset, self.args)
        is_rewarded = reward_funcs is not None or environment_factory is None
        self.reward_funcs = reward_list(reward_funcs, reward_processing_classes) if is_rewarded else []
        self.config = self._make_config(model)
        # Callbacks
        num_steps = self.config.num_steps * self.args.steps_per_batch
        self._bridge = Bridge(self.args, callbacks or [], num_steps=num_steps, is_evaluated="test" in self._splits)
        self._bridge._tell("on_init_end")

    @property
    def state(self) -> TrainerState:
        """Progress of training, and its `log_history`."""
        return self._bridge.state

    @property
    def model(self) -> Any:
        """Model as given, after `train` the trained one."""
        if self._result is not None:
            return self._result.model
        return self._given[0] or self._untrained

    @cached_property
    def _untrained(self) -> Any:
        return load_policy(self.config.model, seed=self.config.seed).model

    @property
    def processing_class(self) -> Any:
        """Tokenizer of the policy."""
        if self._result is not None:
            return self._result.tokenizer
        return self._given[1] or AutoTokenizer.from_pretrained(self.config.model.name)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback for the rest of the run."""
        self._bridge.add(callback)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train, or resume: True takes the newest run of output_dir (NAME-2)."""
        folder, config = self._folder, self.config
        if resume_from_checkpoint:
            is_newest = resume_from_checkpoint is True
            folder = _newest_run(folder) if is_newest else _run_folder(Path(str(resume_from_checkpoint)))
            config = replace(config, resume=str(folder))
        model, tokenizer = self._given
        self.__dict__.pop("_untrained", None)  # its memory is that of the policy
        compared = Arguments(reference=self._reference).compared_in_memory
        own = {f"rewards {name_of(one)}": one for one in self.reward_funcs if callable(one)}
        given = RunObjects(model, tokenizer, self._make_environment, compared, own)
        with named_in_errors():
            self._result = run_request(Request(config, given), folder, (self._bridge,), exact=config.resume is not None)
        self.state.global_step = len(self._result.rows) * self.args.steps_per_batch
        self._bridge.end()
        if self.args.push_to_hub and ranks.rank() == 0:
            self.push_to_hub()
        rows = self._result.rows
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        metrics = {"train_runtime": self._result.summary["seconds"], "train_loss": sum(losses) / max(len(losses), 1)}
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval", **settings: Any
    ) -> dict[str, float]:
        """Evaluate the trained policy on an eval_dataset, the trainer's by default."""
        result, environment = self._require_result(), None
        if eval_dataset is not None:
            splits, names = splits_of(self._splits["train"], eval_dataset, self.args)
            environment = self._make_environment(result.config, splits, names)
            settings = {"num_prompts": len(splits["test"])} | settings
        found: Evaluation = result.evaluate(environment, **settings)
        return evaluation_metrics(found, metric_key_prefix)

    def end(self) -> None:
        """Do nothing, as `train` closes all that it opens."""

    def create_model_card(self, **keywords: Any) -> None:
        """Do nothing: `covey export RUN` writes a card."""

    def save_model(self, output_dir: str | None = None) -> None:
        """Save model (or adapter) and tokenizer, in output_dir by default."""
        if ranks.rank() == 0:
            self._require_result().save(output_dir or self._folder)

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print metrics, one a line."""
        if self.is_world_process_zero():
            width = max(map(len, metrics), default=0)
            lines = [f"  {name:<{width}} = {value}" for name, value in sorted(metrics.items())]
            print("\n".join([f"***** {split} metrics *****", *lines]))

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write metrics to SPLIT_results.json, and into all_results.json, of output_dir."""
        if not self.is_world_process_zero():
            return
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{split}_results.json", dict(metrics))
        if combined:
            known = folder / "all_results.json"
            before = json.loads(known.read_text()) if known.is_file() else {}
            write_json(known, before | dict(metrics))

    def save_state(self) -> None:
        """Write trainer_state.json into output_dir; a run resumes from its checkpoints."""
        if self.is_world_process_zero():
            self._folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(self._folder / "trainer_state.json"))

    def is_world_process_zero(self) -> bool:
        """Check for rank 0, which writes files."""
        return ranks.rank() == 0

    @property
    def accelerator(self) -> Processes:
        """Stand-in for the accelerator."""
        return Processes()

    @property
    def hub_model_id(self) -> str:
        """Repository of push_to_hub."""
        return self.args.hub_model_id or self._folder.name

    def push_to_hub(self, commit_message: str = "End of training", blocking: bool = True, **keywords: Any) -> Any:
        """Push model (or adapter) and tokenizer to hub_model_id.

        It always waits for the end, and leaves out what belongs to a model card, which is not written.
        """
        name = self.hub_model_id
        args = self.args
        given = {"token": args.hub_token, "private": args.hub_private_repo, "revision": args.hub_revision}
        kept = {key: value for key, value in keywords.items() if key not in MODEL_CARD}
        keywords = {key: value for key, value in given.items() if value is not None} | kept
        result = self._require_result()
        result.tokenizer.push_to_hub(name, commit_message=commit_message, **keywords)
        return result.model.push_to_hub(name, commit_message=commit_message, **keywords)  # type: ignore[operator]

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir or "trainer_output")

    def _require_result(self) -> Result:
        if self._result is None:
            raise ValueError("nothing is trained yet: call trainer.train() first")
        return self._result

    def _make_config(self, model: Any) -> Config:
        name = model if isinstance(model, str) and self._given[0] is None else model_name(self._given[0])
        found = {
            "environment": "reward_functions",
            **settings_of(self.args, len(self._splits["train"])),
            "model.name": name,
            "data.path": f"{HOME}:rows",
            "rewards": [reward_entry(reward) for reward in self.reward_funcs],
            "reward_weights": list(self.args.reward_weights or []),
            "environment.in_process": True,
            "environment.timeout": REWARD_SECONDS,
            **frozen_settings(Arguments(reference=self._reference)),
            **_device_setting(self.args),
            **({} if "test" in self._splits else {"evaluation.num_samples": 1}),
            **self._tool_settings(),
            **self._quantised,
            **(self._code if self._given[0] is None else {}),
        }
        with named_in_errors():
            config = make_config(None, found).config
        config.evaluation.num_prompts = len(self._splits["test"]) if "test" in self._splits else 1
        return config

    def _tool_settings(self) -> dict[str, Any]:
        if not self._tools and self._factories is None:
            return {}
        several = isinstance(self._factories, Mapping)
        factory = next(iter(self._factories.values()), None) if several else self._factories
        most = self.args.max_tool_calling_iterations
        return {
            "environment": "tools",
            "environment.tools": [tool_entry(function) for function in self._tools],
            "environment.toolset": None if factory is None else tool_entry(factory),
            "environment.max_turns": MAX_TURNS if most is None else most + 1,
            "environment.tool_timeout": REWARD_SECONDS,
        }

    def _make_environment(
        self, config: Config, splits: Mapping[Split, Any] | None = None, names: Sequence[str] = ()
    ) -> Environment:
        """Build the environment of all rows; `names` are data sets of test rows."""
        judged = self._make_rewards(config, self._splits if splits is None else splits)
        judged.call("test", self._eval_names if splits is None else names)
        if not isinstance(config.environment, ToolsConfig):
            return judged
        made = RowTools(judged, self._tools, self._factories, has_rewards=bool(self.reward_funcs))
        most, role = config.environment.max_tool_calls, config.environment.tool_role
        made.rules = ToolRules(max_calls=most, role=role, calls_last=False)  # as in TRL's loop
        made.tool_timeout, made.written = config.environment.tool_timeout, str
        return made

    def _make_rewards(self, config: Config, splits: Mapping[Split, Any]) -> RewardFunctions:
        """Build the rewards; without an eval_dataset evaluations take the first prompt."""
        rows: dict[Split, list[Any]] = {split: list(self._read_rows(split, of)) for split, of in splits.items()}
        rows.setdefault("test", rows["train"][:1])
        workers = WorkerSettings(timeout=config.environment.timeout)
        how = RewardSettings(workers, in_process=True, max_failure_rate=1.0, nan_is_none=True)
        functions = reward_functions(self.reward_funcs or [no_reward], config.reward_weights)
        made = RewardFunctions(rows, functions, how)
        made.follow(0, config.num_steps, 0.0)
        return made

    def _read_rows(self, split: Split, rows: Iterable[Any]) -> Iterator[Any]:
        """Check rows. ValueError for pictures too, which TRL shows to models that see."""
        for index, row in enumerate(rows):
            given = row if self._factories is None else with_prompt(row)
            picture = picture_in(given) if isinstance(given, Mapping) else ""
            if picture:
                raise ValueError(f"{split} row {index} has {picture}, and policies are trained on text: leave it out")
            try:
                read = PromptFormat(said=PREFILLED).read(given)
            except ValueError as error:
                raise ValueError(f"{split} row {index} {error}") from error
            yield {"prompt": read["prompt"]} if self.args.remove_unused_columns else read


def _short_name(model: Any) -> str:
    name = model if isinstance(model, str) else model.config._name_or_path or type(model).__name__
    return str(name).rstrip("/").rpartition("/")[2]


def _refuse_beside_quantised(model: str, processing_class: Any, keywords: Mapping[str, Any]) -> None:
    if processing_class is not None and processing_class.name_or_path != model:
        raise ValueError("under 4 or 8 bits the tokenizer is that of the model: leave processing_class out")
    if other := next((name for name in keywords if name not in ("device_map", "dtype", "torch_dtype")), None):
        raise ValueError(f"model_init_kwargs[{other!r}] has no counterpart under 4 or 8 bits")


def _load(
    model: Any, processing_class: Any, peft_config: Any, keywords: dict[str, Any], has_code: bool
) -> tuple[Any, Any]:
    """Load model and tokenizer, (None, None) if covey loads them by name."""
    keywords.pop("device_map", None)  # model.device, see `_device_setting`
    if "torch_dtype" in keywords:  # its former name, which transformers overlooks beside this one
        keywords["dtype"] = keywords.pop("torch_dtype")
    if isinstance(dtype := keywords.get("dtype"), str):
        one_of("model_init_kwargs['dtype']", dtype, (*DTYPES, "auto"))
    if peft_config is not None and (other := other_than_plain_lora(peft_config)):
        raise ValueError(f"peft_config must be a LoraConfig of plain adapters, got {other}")
    if has_code:
        check_code(ModelConfig(name=model, code=FOLDER))
    if isinstance(model, str) and processing_class is None and peft_config is None and not keywords:
        return None, None
    if not isinstance(model, str) and keywords:
        raise ValueError("model_init_kwargs needs a model by name, got one in memory")
    tokenizer = processing_class
    if tokenizer is None:
        name = model if isinstance(model, str) else str(model.config._name_or_path)
        revision = keywords.get("revision") or "main"
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=has_code)
    loaded = model
    if isinstance(model, str):
        keywords = {"dtype": "float32", **keywords, "trust_remote_code": has_code}
        loaded, lacking = read_weights("causal", model, **keywords)
        if lacking:
            raise ValueError(f"model={model} {lacking}")
        if has_code:
            restore_buffers(loaded)
    if peft_config is None:
        return loaded, tokenizer
    from peft import get_peft_model

    with warnings.catch_warnings():  # peft knows checkpointing by its former name
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        return get_peft_model(loaded, peft_config), tokenizer


def _device_setting(args: GRPOConfig) -> dict[str, str]:
    """Read the device of model_init_kwargs. ValueError for a split model."""
    given = dict(args.model_init_kwargs or {}).get("device_map")  # type: ignore[arg-type] # JSON is read by now
    if given is None or args.use_cpu:
        return {}
    try:
        return {"model.device": device_of_map(given)}
    except ValueError as error:
        raise ValueError(f"model_init_kwargs: {error}") from error


def _run_folder(path: Path) -> Path:
    """Find the run of a checkpoint. ValueError without one."""
    found = next((folder for folder in (path, *path.parents[:3]) if (folder / "config.yaml").is_file()), None)
    if found is None:
        raise ValueError(f"resume_from_checkpoint={path} is no run of covey's, and no checkpoint of one")
    return found


def _newest_run(folder: Path) -> Path:
    """Find the newest run of this output_dir. ValueError without a checkpoint."""
    named = re.compile(re.escape(folder.name) + r"(-[0-9]+)?")
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    saved = [path for path in beside if named.fullmatch(path.name) and any(path.glob("checkpoints/step-*"))]
    if not saved:
        raise ValueError(f"resume_from_checkpoint=True: no run in {folder} has a checkpoint")
    return max(saved, key=begun_at)
