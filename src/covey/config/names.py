"""Tell what a name that is no setting may have meant."""

import difflib
from collections.abc import Collection


def named_elsewhere(name: str, known: Collection[str]) -> list[str]:
    """Return what a setting of TRL, verl or transformers is called here.

    It is in the same section where that has it too.

    >>> named_elsewhere("cold_start.learning_rate", ["optimizer.lr", "cold_start.lr"])
    ['cold_start.lr']
    """
    if name in RUN_FOLDER:
        return ["hydra.run.dir"]
    section, _, leaf = name.rpartition(".")
    own = OTHER_NAMES.get(leaf) or _OTHER_BY_LETTERS.get(_letters(leaf), ())
    here = [f"{section}.{other.rpartition('.')[2]}" for other in own if "=" not in other]
    return [other for other in here if other in known] or list(own)


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
"""Settings -> what TRL, verl, OpenRLHF, prime-rl and transformers call what they do.

Where one value of a setting does it, that is the answer: `use_vllm` is `engine=vllm`.
"""
OTHER_NAMES = {name: here for here, names in _ELSEWHERE.items() for name in names.split()}
RUN_FOLDER = (
    *("dir", "folder", "output_dir", "run", "run_dir", "run_folder"),
    *("output.dir", "output.folder", "output.path"),
)
"""What people type for the folder of a run, which Hydra makes."""
_OTHER_BY_LETTERS = {_letters(name): here for name, here in OTHER_NAMES.items()}
