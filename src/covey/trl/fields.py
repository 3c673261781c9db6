"""What becomes of every field of GRPOConfig: the one table that the mapping obeys and the docs show."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

MAPPED: dict[str, str] = {
    # Batches and length of the run
    "output_dir": "the run folder; where it holds a run already, the next free name (`output_dir-2`)",
    "per_device_train_batch_size": "`groups_per_step` = generation_batch_size / num_generations; `engine.max_rows` = "
    "what a process samples at a time",
    "gradient_accumulation_steps": "as per_device_train_batch_size; how a batch is split is `micro_batch_tokens`, and "
    "never changes the update",
    "steps_per_generation": "`mini_batch_groups`, where it is a multiple of gradient_accumulation_steps: that many "
    "optimiser steps on what is sampled at once, of whole groups, at the learning rate of the first",
    "generation_batch_size": "`groups_per_step` x `group_size`",
    "num_generations": "`group_size`",
    "num_iterations": "`updates_per_batch`; the learning rate is that of the batch's first update",
    "max_steps": "`num_steps` = max_steps / optimiser steps on a batch",
    "num_train_epochs": "`num_steps` = epochs x (rows // groups_per_step), where max_steps is not set",
    "shuffle_dataset": "`shuffle`",
    "seed": "`seed`: rollouts are a pure function of it",
    # Sampling
    "max_completion_length": "`sampling.max_tokens`; with tools it bounds each turn, and `environment.max_context` the "
    "whole; TRL bounds the turns and what tools said together",
    "vllm_max_model_length": "`sampling.max_total_tokens`, with vllm_mode=colocate",
    "max_tool_calling_iterations": "`environment.max_turns`, one more, the last without calls; None is 64 turns",
    "temperature": "`sampling.temperature`",
    "top_p": "`sampling.top_p`; log-probs are those of the distribution sampled from, TRL's those of the whole",
    "top_k": "`sampling.top_k`; as top_p",
    "min_p": "`sampling.min_p`; as top_p",
    "generation_kwargs": "keys temperature, top_p, top_k, min_p and stop_strings (`sampling.stop`); others are refused",
    "chat_template_kwargs": "`model.chat_template_kwargs`",
    # The objective
    "beta": "`algorithm.kl_coef`, estimator k3",
    "use_bias_correction_kl": "`algorithm.kl_gradient=is_weighted`, without it `naive`",
    "epsilon": "`eps_low` of the loss, and `eps_high` where epsilon_high is not set",
    "epsilon_high": "`eps_high` of the loss; `ratio_max` with cispo",
    "delta": "`two_sided_delta` of the loss",
    "loss_type": "`algorithm.loss` and `algorithm.aggregation`: grpo, dr_grpo, dapo, bnpo (where a step is one "
    "micro-batch, else it depends on the split), cispo, sapo, luspo, vespo",
    "sapo_temperature_pos": "`tau_pos` of the loss",
    "sapo_temperature_neg": "`tau_neg` of the loss",
    "vespo_k_pos": "`k_pos` of the loss",
    "vespo_lambda_pos": "`lambda_pos` of the loss",
    "vespo_k_neg": "`k_neg` of the loss",
    "vespo_lambda_neg": "`lambda_neg` of the loss",
    "importance_sampling_level": "`algorithm.ratio`: token or sequence_mean",
    "scale_rewards": "`algorithm.advantage`: group_zscore, group_center_batch_std or group_center, with TRL's 1e-4",
    "multi_objective_aggregation": "normalize_then_sum is `algorithm.advantage=gdpo`",
    "reward_weights": "`reward_weights`",
    "mask_truncated_completions": "`algorithm.mask_truncated`",
    "top_entropy_quantile": "`algorithm.high_entropy_fraction`; the threshold is that of the whole step; below 1 "
    "without an entropy bonus, which TRL has on the same tokens alone",
    "entropy_coef": "`algorithm.entropy_coef`, a mean over the tokens of the whole step",
    "use_adaptive_entropy": "`algorithm.target_entropy` = entropy_target; it moves once a batch",
    "entropy_target": "`algorithm.target_entropy`, with use_adaptive_entropy",
    "off_policy_mask_threshold": "`algorithm.off_policy_mask_delta`",
    "sync_ref_model": "`algorithm.reference_refresh_every`, of ref_model_sync_steps",
    "ref_model_sync_steps": "`algorithm.reference_refresh_every`, with sync_ref_model; in whole batches, rounded up",
    "ref_model_mixup_alpha": "`algorithm.reference_refresh_alpha`, with sync_ref_model",
    # The optimiser
    "learning_rate": "`optimizer.lr`",
    "lr_scheduler_type": "`optimizer.schedule`: linear, cosine, cosine_with_min_lr, constant_with_warmup, constant "
    "(without warm-up)",
    "lr_scheduler_kwargs": "`min_lr_rate` or `min_lr` of cosine_with_min_lr is `optimizer.min_lr_ratio`",
    "warmup_steps": "`optimizer.warmup_steps`; below 1 a share of the steps. The first step has lr / warmup_steps",
    "optim": "`optimizer.name`: adamw_torch, adamw_torch_fused (adamw), adamw_bnb_8bit, adamw_8bit (adamw8bit), sgd",
    "weight_decay": "`optimizer.weight_decay`, on matrices",
    "adam_beta1": "`optimizer.betas`",
    "adam_beta2": "`optimizer.betas`",
    "adam_epsilon": "`optimizer.eps`",
    "max_grad_norm": "`optimizer.max_grad_norm`",
    # The model
    "bf16": "`model.precision=bfloat16`; weights are float32",
    "fp16": "`model.precision=float16`",
    "gradient_checkpointing": "`model.gradient_checkpointing`",
    "model_init_kwargs": "for `from_pretrained`; device_map: `model.device`, no split; trust_remote_code is refused",
    "disable_dropout": "either: dropout is always removed, or the sampled policy would not be the trained one",
    "use_cpu": "`model.device=cpu`",
    "remove_unused_columns": "True leaves reward functions the prompts and completions alone",
    # vLLM
    "use_vllm": "`engine=vllm`",
    "vllm_mode": "colocate: beside the trainer; server: `engine.url`",
    "vllm_server_base_url": "`engine.url`",
    "vllm_gpu_memory_utilization": "`engine.gpu_memory_utilization`, with vllm_mode=colocate",
    "vllm_enable_sleep_mode": "True is `engine.sleep=2`, with vllm_mode=colocate; without it covey decides",
    "vllm_server_host": "`engine.url`, with vllm_server_port",
    "vllm_server_port": "`engine.url`, with vllm_server_host",
    "vllm_importance_sampling_correction": "with vLLM: `algorithm.correction`; not with vespo, where TRL has it in "
    "the ratio",
    "vllm_importance_sampling_mode": "`algorithm.correction` (truncate, mask) and `algorithm.correction_level`",
    "vllm_importance_sampling_clip_max": "`algorithm.correction_max`",
    "vllm_importance_sampling_clip_min": "`algorithm.correction_min`",
    # Evaluation, saving, logging
    "eval_strategy": "`evaluation.every`; covey also evaluates before and after",
    "eval_steps": "`evaluation.every`, in whole batches, rounded up; below 1 a share of the steps",
    "eval_on_start": "either: with an eval_dataset every run is evaluated at its start",
    "do_eval": "either: read by scripts, not by the trainer",
    "do_train": "either: read by scripts, not by the trainer",
    "do_predict": "either: read by scripts, not by the trainer",
    "per_device_eval_batch_size": "`engine.max_rows`, where it is the larger of both",
    "num_generations_eval": "`evaluation.num_samples`",
    "save_strategy": "`output.save_every`: steps, epoch, or no (the end of the run is always saved)",
    "save_steps": "`output.save_every`, in whole batches, rounded up; below 1 a share of the steps",
    "save_total_limit": "`output.keep_last`; all are kept where it is not set",
    "logging_steps": "rows of `state.log_history`, means over these steps; metrics.jsonl has every step",
    "logging_strategy": "steps, or no: no rows in `state.log_history`",
    "logging_first_step": "the first step is a row of `state.log_history`",
    "report_to": "`output.trackers`: none, tensorboard, wandb",
    "disable_tqdm": "True is `output.progress=false`",
    "log_completions": "`output.show_rollouts`: completions in the terminal; rollouts.jsonl always has some",
    "num_completions_to_print": "`output.show_rollouts`, with log_completions",
    "resume_from_checkpoint": "either: read by scripts, which hand it to `trainer.train`",
    "push_to_hub": "`trainer.push_to_hub()` at the end of training",
    "hub_model_id": "the repository of push_to_hub",
    "hub_token": "the token of push_to_hub",
    "hub_private_repo": "of push_to_hub",
    "hub_revision": "of push_to_hub",
    "hub_strategy": "end; every_save (TRL's default) pushes at the end too, as checkpoints hold more than a model",
    # Processes
    "ddp_timeout": "`timeouts.ranks`",
    "fsdp": "full_shard is `parallel.strategy=fsdp`",
    "local_rank": "either: launchers say it in the environment",
    # covey's own
    "preflight": "not of TRL: `preflight.enabled`; False trains without the checks before the first step",
    "preflight_logprob_tolerance": "not of TRL: `preflight.logprob_tolerance`, in nats; None goes by the precision",
    "preflight_gradient_tolerance": "not of TRL: `preflight.gradient_tolerance`; None goes by the precision",
}
"""Field -> what it becomes."""
OWN = tuple(name for name, meaning in MAPPED.items() if meaning.startswith("not of TRL"))
"""Fields that TRL does not have."""

LAYOUT = "how work is laid out on a GPU is `micro_batch_tokens`, `packing` and `model.attention`"
NO_LOADER = "rows are in memory and prompts follow from the seed; there is no data loader"
NO_DDP = "gradients are summed once a step, without torch's DDP wrapper"
VLLM_STARTS = "covey starts and watches its vLLM itself; a vLLM of your own is joined by vllm_mode=server"
OWN_LOG = "logs are covey's: covey.log, metrics.jsonl, Python's logging"
CODE = "code of a repository is never run"

REFUSED: dict[str, str] = {
    "trust_remote_code": CODE,
    "router_aux_loss_coef": "no auxiliary loss is added to the objective",
    "cast_lm_head_to_fp32": "model.precision=float32 computes all in float32",
    "ds3_gather_for_generation": "there is no DeepSpeed; sharded weights are gathered by `parallel.strategy=fsdp`",
    "pad_to_multiple_of": "nothing is padded: " + LAYOUT,
    "repetition_penalty": "sampled tokens would not have the log-probs that are trained",
    "cache_implementation": "the engine has a cache of its own (`engine.cache_bytes`)",
    **dict.fromkeys(("vllm_model_impl", "vllm_group_port", "vllm_tensor_parallel_size"), VLLM_STARTS),
    "vllm_structured_outputs_regex": "sampled tokens would not have the log-probs that are trained",
    "vllm_server_timeout": "the deadline is `timeouts.loading`",
    "vllm_importance_sampling_cap": "TRL has renamed it: vllm_importance_sampling_clip_max",
    "entropy_coef_min": "the bounds of the adaptive bonus are 0 and 1",
    "entropy_coef_max": "the bounds of the adaptive bonus are 0 and 1",
    "entropy_coef_delta": "the step of the adaptive bonus is 0.005",
    "log_multimodal": "there are no images",
    **dict.fromkeys(("log_unique_prompts", "log_on_each_node", "log_level", "log_level_replica", "debug"), OWN_LOG),
    "log_completions_hub_repo": "completions stay in rollouts.jsonl of the run",
    "use_transformers_continuous_batching": "covey's engine batches continuously by itself",
    "transformers_continuous_batching_config": "covey's engine batches continuously by itself",
    "use_transformers_paged": "covey's engine batches continuously by itself",
    "optim_args": "the settings of the optimiser are fields of their own",
    "optim_target_modules": "the optimiser updates all trained weights",
    "average_tokens_across_devices": "denominators are always global",
    "label_smoothing_factor": "GRPO has no labels",
    "label_names": "GRPO has no labels",
    "bf16_full_eval": "an evaluation samples the policy that is trained, in its precision",
    "fp16_full_eval": "an evaluation samples the policy that is trained, in its precision",
    "tf32": "torch.backends.cuda.matmul.allow_tf32 sets it for a process",
    "activation_checkpointing": "gradient_checkpointing is the switch",
    "activation_checkpointing_kwargs": "gradient_checkpointing is the switch",
    "gradient_checkpointing_kwargs": "checkpoints are never reentrant; {'use_reentrant': False} says what is so",
    "torch_compile": "models are not compiled; `model.kernels` are",
    "torch_compile_backend": "models are not compiled; `model.kernels` are",
    "torch_compile_mode": "models are not compiled; `model.kernels` are",
    "use_liger_kernel": "logits are computed in pieces without it (`logprob_chunk`)",
    "liger_kernel_config": "logits are computed in pieces without it (`logprob_chunk`)",
    "use_cache": "training keeps no cache; sampling always does",
    "neftune_noise_alpha": "the sampled policy would not be the trained one",
    "torch_empty_cache_steps": LAYOUT,
    "auto_find_batch_size": "TRL refuses it as well; preflight measures what fits in memory",
    "logging_nan_inf_filter": "what is not finite is logged as null",
    "include_num_input_tokens_seen": "num_tokens in the log counts sampled tokens",
    "run_name": "trackers name a run by its folder: output_dir",
    "project": "output.wandb_project of covey.train names a project",
    "trackio_space_id": "trackio is none of the trackers",
    "trackio_bucket_id": "trackio is none of the trackers",
    "trackio_static_space_id": "trackio is none of the trackers",
    "eval_delay": "evaluations begin with the run",
    "prediction_loss_only": "an evaluation measures rewards, not a loss",
    "eval_do_concat_batches": "an evaluation measures rewards, not predictions",
    "eval_use_gather_object": "an evaluation measures rewards, not predictions",
    "eval_accumulation_steps": "an evaluation measures rewards, not predictions",
    "include_for_metrics": "an evaluation measures rewards; a callback may add metrics",
    "batch_eval_metrics": "an evaluation measures rewards; a callback may add metrics",
    "save_only_model": "a checkpoint holds all that an exact resume needs; its policy/ is the model alone",
    "save_on_each_node": "the first process saves",
    "enable_jit_checkpoint": "SIGTERM always saves the last finished step",
    "hub_always_push": "the push comes at the end",
    "load_best_model_at_end": "the best checkpoint is kept in the run folder (`output.keep_best`)",
    "metric_for_best_model": "the best checkpoint is that of the highest accuracy",
    "greater_is_better": "the best checkpoint is that of the highest accuracy",
    "ignore_data_skip": "a resumed run always goes on where it was",
    "restore_callback_states_from_checkpoint": "callbacks keep their own state",
    "full_determinism": "runs on a CPU repeat bit for bit without it",
    "data_seed": "the order of prompts follows from seed",
    "accelerator_config": "there is no Accelerator; `parallel` and launchers say how processes train together",
    "parallelism_config": "there is no Accelerator; `parallel` and launchers say how processes train together",
    "dataloader_drop_last": NO_LOADER,
    "dataloader_num_workers": NO_LOADER,
    "dataloader_pin_memory": NO_LOADER,
    "dataloader_persistent_workers": NO_LOADER,
    "dataloader_prefetch_factor": NO_LOADER,
    "dataloader_multiprocessing_context": NO_LOADER,
    "dataloader_in_order": NO_LOADER,
    "train_sampling_strategy": NO_LOADER,
    "length_column_name": NO_LOADER,
    "ddp_find_unused_parameters": NO_DDP,
    "ddp_bucket_cap_mb": NO_DDP,
    "ddp_broadcast_buffers": NO_DDP,
    "ddp_static_graph": NO_DDP,
    "ddp_backend": "gloo on CPUs, NCCL on GPUs",
    "fsdp_config": "`parallel.strategy=fsdp` is FSDP2 over all processes",
    "deepspeed": "there is no DeepSpeed; fsdp='full_shard' shards weights, gradients and optimiser state",
    "skip_memory_metrics": "summary.json has the peak of memory",
}
"""Field -> why it is refused, by name, when it is set to another value than its default."""

GONE: dict[str, str] = {
    "max_prompt_length": "leave it out: prompts are never cut, and the preflight names those that are too long",
    "evaluation_strategy": "write eval_strategy",
    "warmup_ratio": "write warmup_steps, which below 1 is a share of the steps",
    "overwrite_output_dir": "leave it out: a folder that holds a run is never written over",
    "no_cuda": "write use_cpu",
    "logging_dir": "leave it out: what trackers write is in output_dir",
    "save_safetensors": "leave it out: weights are always saved so",
    "group_by_length": f"leave it out: {NO_LOADER}",
    "use_liger_loss": f"leave it out: {REFUSED['use_liger_kernel']}",
    "wandb_log_unique_prompts": f"leave it out: {OWN_LOG}",
    "vllm_max_model_len": "write vllm_max_model_length",
    "vllm_guided_decoding_regex": f"leave it out: {REFUSED['vllm_structured_outputs_regex']}",
    **dict.fromkeys(("vllm_device", "vllm_dtype"), f"leave it out: {VLLM_STARTS}"),
    "tokenizer": "GRPOTrainer takes it as processing_class",
}
"""Field, or argument of the trainer, that older versions had -> what to do about it."""


@contextmanager
def named_in_errors() -> Iterator[None]:
    """Have a ValueError that names settings of covey's name the fields of GRPOConfig that set them, too."""
    try:
        yield
    except ValueError as error:
        named = set(re.findall(r"[a-z_]+\.[a-z_]+", str(error)))
        of_fields = {name: re.findall(r"`([a-z_]+\.[a-z_]+)", meaning) for name, meaning in MAPPED.items()}
        found = [f"{name} for {one}" for name, settings in of_fields.items() for one in settings if one in named]
        if not found or type(error) is not ValueError:
            raise
        raise ValueError(f"{error} (in GRPOConfig: {', '.join(found)})") from error


def table() -> str:
    """Return the rows of the page's table, in the order of the alphabet."""
    rows = {**{name: MAPPED[name] for name in MAPPED}, **{name: f"refused: {REFUSED[name]}" for name in REFUSED}}
    return "\n".join(["| field | |", "|---|---|", *(f"| `{name}` | {rows[name]} |" for name in sorted(rows))])
