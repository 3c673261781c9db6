"""Tell what a name that is no setting may have meant, and what settings were called in earlier versions."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any


def named_elsewhere(name: str, known: Collection[str]) -> list[str]:
    """Return what a setting of TRL, verl, transformers or an earlier covey is called here.

    It is in the same section where that has it too.

    >>> named_elsewhere("cold_start.learning_rate", ["optimizer.lr", "cold_start.lr"])
    ['cold_start.lr']
    """
    if (now := current_name(name)) != name and now in known:
        return [now]
    if name in RUN_FOLDER:
        return ["hydra.run.dir"]
    section, _, leaf = name.rpartition(".")
    own = OTHER_NAMES.get(leaf) or _OTHER_BY_LETTERS.get(_letters(leaf), ())
    here = [f"{section}.{other.rpartition('.')[2]}" for other in own if "=" not in other]
    return [other for other in here if other in known] or list(own)


def current_name(name: str) -> str:
    """Return what a setting is called today that an earlier version may have called otherwise.

    >>> current_name("deadlines.scoring"), current_name("seed")
    ('timeouts.scoring', 'seed')
    """
    if name in RENAMED:
        return RENAMED[name]
    section, dot, leaf = name.partition(".")
    return f"{RENAMED.get(section, section)}{dot}{leaf}"


def with_current_names(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the settings of a saved run under the names of today, those of a mixture's parts included."""
    found: dict[Any, Any] = {RENAMED.get(section, section): value for section, value in saved.items()}
    for section, value in found.items():
        if isinstance(value, Mapping):
            found[section] = _renamed_within(section, value)
    environment = found.get("environment")
    if isinstance(environment, Mapping) and isinstance(parts := environment.get("parts"), Mapping):
        named = {
            name: _renamed_within("environment", part) if isinstance(part, Mapping) else part
            for name, part in parts.items()
        }
        found["environment"] = {**environment, "parts": named}
    return found


def _renamed_within(section: Any, settings: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the settings of one section under current names and values, keeping names already there."""
    found: dict[Any, Any] = {}
    for name, value in settings.items():
        full = f"{section}.{name}"
        if full in REMOVED:
            continue
        now = RENAMED.get(full, "").rpartition(".")[2] or name
        given = RENAMED_VALUES.get(full, {}).get(value, value) if isinstance(value, str | bool) else value
        found[name if now in settings else now] = given
    return found


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return at most three names, the likeliest first.

    >>> nearest("lr", ["optimizer.lr", "seed"]), nearest("optimizer.MaxGradNorm", ["optimizer.max_grad_norm"])
    (['optimizer.lr'], ['optimizer.max_grad_norm'])
    """
    leaf = name.rpartition(".")[2]
    same_letters = [other for other in known if _letters(other) == _letters(name)]
    peers = [other for other in known if other.count(".") == name.count(".")]
    alike = difflib.get_close_matches(name, peers, n=1, cutoff=0.75)
    same_leaf = [other for other in known if _letters(other.rpartition(".")[2]) == _letters(leaf)]
    near_leaf = [
        other for other in known if difflib.SequenceMatcher(None, other.rpartition(".")[2], leaf).ratio() > 0.8
    ]
    return list(dict.fromkeys([*same_letters, *alike, *same_leaf, *near_leaf]))[:3]


def _letters(name: str) -> str:
    """Return a name without what people spell differently: capitals, "_" and "-"."""
    return name.replace("_", "").replace("-", "").lower()


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a message, empty where no name is near.

    >>> did_you_mean("num_generation", ["group_size"])
    '; did you mean group_size?'
    """
    names = named_elsewhere(name, known) or nearest(name, known)
    if not names and (alike := difflib.get_close_matches(name.rpartition(".")[2], OTHER_NAMES, n=1, cutoff=0.85)):
        names = named_elsewhere(alike[0], known)
    return f"; did you mean {' or '.join(names)}?" if names else ""


def value_now(setting: str, value: str) -> str:
    """Return the end of a message that says what a value of an earlier version is called now, empty for another.

    >>> value_now("model.attention", "flex")
    '; did you mean varlen?'
    """
    now = RENAMED_VALUES.get(setting, {}).get(value)
    return f"; did you mean {now}?" if now else ""


RENAMED: dict[str, str] = {
    "deadlines": "timeouts",
    "distribution": "parallel",
    "environment.second_turn": "environment.max_turns",
    "environment.tier": "environment.isolation",
    "environment.watch": "environment.monitors",
    "environment.wall_seconds": "environment.timeout",
    "output.grace_seconds": "output.shutdown_timeout",
}
"""What settings and sections were called in earlier versions; settings of saved runs are read under both names."""
REMOVED = frozenset({"engine.kernels", "model.linear"})
"""Settings of earlier versions whose choice model.kernels makes now; saved runs have them."""
RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    "environment.second_turn": {False: 1, True: 2},
    "model.attention": {"blocks": "sdpa", "compiled": "auto", "flex": "varlen"},
    "model.kernels": {"compiled": "auto"},
}
"""What values were called in earlier versions."""
CLIP_RANGE = ("algorithm.loss_options.eps_low", "algorithm.loss_options.eps_high")
_ELSEWHERE: dict[tuple[str, ...], str] = {
    ("algorithm.advantage",): "adv_estimator scale_rewards",
    ("algorithm.aggregation",): "loss_agg_mode",
    ("algorithm.entropy_coef",): "entropy_coeff",
    ("algorithm.kl_coef",): "beta init_kl_coef kl_loss_coef",
    ("algorithm.loss", "algorithm.aggregation"): "loss_type",
    CLIP_RANGE[1:]: "clip_ratio_high epsilon_high",
    CLIP_RANGE[:1]: "clip_ratio_low",
    CLIP_RANGE: "clip clip_eps clip_ratio epsilon",
    ("algorithm.mask_truncated",): "mask_truncated_completions",
    ("algorithm.reference_refresh_every",): "sync_ref_model",
    ("data.path",): "dataset_name prompt_data train_files",
    ("data.prompt_column",): "input_key",
    ("engine.gpu_memory_utilization",): "vllm_gpu_memory_utilization",
    ("engine=vllm",): "use_vllm vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port"
    " vllm_tensor_parallel_size",
    ("environment.tests_per_problem",): "num_tests test_cases",
    ("evaluation.every",): "eval_steps test_freq",
    ("group_size",): "n_samples_per_prompt num_generations",
    ("groups_per_step",): "rollout_batch_size train_batch_size",
    ("groups_per_step", "micro_batch_tokens"): "gradient_accumulation_steps per_device_train_batch_size",
    ("max_staleness",): "sync_iter",
    ("mini_batch_groups",): "ppo_mini_batch_size",
    ("model.kernels",): "linear",
    ("model.lora_rank",): "lora_r",
    ("model.lora_targets",): "lora_target_modules",
    ("model.name",): "model_name_or_path pretrain",
    ("model.precision",): "bf16 dtype fp16 torch_dtype",
    ("num_epochs",): "max_epochs num_episodes",
    ("num_steps",): "max_steps total_training_steps",
    ("optimizer.betas",): "adam_beta1 adam_beta2",
    ("optimizer.eps",): "adam_epsilon",
    ("optimizer.lr",): "actor_learning_rate learning_rate",
    ("optimizer.max_grad_norm",): "grad_clip",
    ("optimizer.schedule",): "lr_scheduler_type",
    ("optimizer.warmup_steps",): "lr_warmup_steps warmup_ratio",
    ("output.keep_last",): "save_total_limit",
    ("output.save_every",): "save_freq save_steps",
    ("output.trackers",): "report_to",
    ("rewards",): "reward_funcs",
    ("sampling.max_tokens",): "generate_max_len max_completion_length max_new_tokens max_response_length",
    ("sampling.max_total_tokens",): "vllm_max_model_length",
    ("total_rollouts",): "total_episodes",
    ("updates_per_batch",): "num_iterations ppo_epochs",
}
"""Settings -> what TRL, verl, OpenRLHF, prime-rl and transformers call what they do, or what they were called here.

Where one value of a setting does it, that is the answer: `use_vllm` is `engine=vllm`.
"""
OTHER_NAMES = {name: here for here, names in _ELSEWHERE.items() for name in names.split()}
RUN_FOLDER = (
    *("dir", "folder", "output_dir", "run", "run_dir", "run_folder"),
    *("output.dir", "output.folder", "output.path"),
)
"""What people type for the folder of a run, which Hydra makes."""
_OTHER_BY_LETTERS = {_letters(name): here for name, here in OTHER_NAMES.items()}
