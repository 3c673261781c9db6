"""Settings of TorchRL, verl, TRL and the documents are answered with covey's, and with its values."""

import pytest

from covey.algorithm.credit.turns import anchor_state
from covey.algorithm.losses import LOSSES
from covey.cli.command_line import arrange
from covey.cli.help import group_choices
from covey.config import foreign
from covey.config.schema import setting_names
from covey.system.lookup import option_names
from covey.trl.fields import MAPPED, REFUSED

KNOWN = {*setting_names(), "hydra.run.dir", "algorithm.advantage_options.k"}
OPTIONS = {"algorithm.loss_options.eps_low", "algorithm.loss_options.eps_high", "algorithm.loss_options.dual_clip"}
OF_TURNS = {"algorithm.turn_credit_options.weight", "algorithm.turn_credit_options.scale"}


def refused(*words: str) -> str:
    """Return the line for words typed to `covey train`."""
    with pytest.raises(ValueError) as caught:
        arrange("train", ["recipe=arithmetic", *words])
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("train.sync_iter=False", "source=ray max_staleness=1"),
        ("train.sync_iter=true", "max_staleness=0"),
        ("sync_iter=False", "source=ray max_staleness=1"),
        ("mode=sync", "source=local"),
        ("mode=async", "source=ray max_staleness=2"),
        ("env.dataset=ifeval", "recipe=ifeval"),
        ("policy.kl_coef=0.1", "algorithm.kl_coef=0.1"),
        ("train.kl_to_ref_coeff=1.0", "algorithm.kl_coef=1.0"),
        ("kl_to_inference_coeff=0.5", "algorithm.sampler_kl_coef=0.5"),
        ("train.kl_coef_in_loss=False", "algorithm.kl_in=reward"),
        ("+train.checkpoint_frequency=7", "output.save_every=7"),
        ("train_model.num_devices=2", "devices.trainer=2"),
        ("ref_model.name=some/one", "algorithm.reference_model=some/one"),
        ("actor_rollout_ref.ref.model.path=some/one", "algorithm.reference_model=some/one"),
        ("ref_model_path=some/one", "algorithm.reference_model=some/one"),
        ("ref_model.num_devices=2", "devices.reference=2"),
        ("inference_model.num_devices=2", "devices.sampler=2"),
        ("inference_model.gpu_memory_utilization=0.4", "engine=vllm engine.gpu_memory_utilization=0.4"),
        ("actor_rollout_ref.rollout.n=5", "group_size=5"),
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl", "algorithm.kl_estimator=k3 algorithm.kl_gradient=naive"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "algorithm.aggregation=seq_mean_token_sum"),
        ("trainer.save_freq=-1", "output.save_every=0"),
        ("trainer.logger=['console','wandb']", "output.trackers=[wandb]"),
        ("kl_penalty_weight=0.001", "algorithm.kl_coef=0.001"),
        ("max_iters=50", "num_steps=50"),
        ("batch_size=16", "groups_per_step=16"),
        ("target_modules=[q_proj,v_proj]", "model.lora_targets=[q_proj,v_proj]"),
        ("target_modules=['q_proj', \"v_proj\"]", "model.lora_targets=[q_proj,v_proj]"),
        ("actor_rollout_ref.model.target_modules=all-linear", "model.lora_targets=[all-linear]"),
        ("train_dataset=rows.jsonl", "data.path=rows.jsonl"),
    ],
)
def test_a_setting_of_another_system_is_answered_with_words_to_type(typed: str, words: str) -> None:
    assert f"{typed.lstrip('+')} is {words} here" in refused(typed)


def test_numbers_that_depend_on_each_other_are_computed_from_all_that_was_typed() -> None:
    line = refused("train.total_dialog_turns=100_000", "train.dialog_turns_per_batch=64", "env.repeats=8")
    assert "is total_rollouts=100000 here" in line
    assert "is groups_per_step=8 here" in line


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["num_train_epochs=3"], "num_epochs=3"),
        (["num_train_epochs=3", "max_steps=-1"], "num_epochs=3"),
        (["num_train_epochs=3", "max_steps=50"], "num_steps=50"),
        (["trainer.total_epochs=15"], "num_epochs=15"),
        (["trainer.total_epochs=15", "trainer.total_training_steps=null"], "num_epochs=15"),
        (["trainer.total_epochs=15", "trainer.total_training_steps=400"], "num_steps=400"),
    ],
)
def test_of_two_lengths_of_a_run_the_one_counts_that_counts_there(typed: list[str], words: str) -> None:
    given = dict(word.split("=") for word in typed)
    found = [foreign.answer(name, value, given) for name, value in given.items()]
    assert [word for one in found if one is not None for word in one.words] == [words]


def test_every_answer_names_settings_and_choices_that_there_are() -> None:
    choices = group_choices()
    for name, counterpart in foreign.ALL.items():
        answers = [counterpart.answer(value, {}) for value in (*counterpart.choices, "1")]
        assert all(found.words or found.note or counterpart.choices for found in answers), name
        for word in (word for found in answers for word in found.words):
            left, _, value = word.partition("=")
            assert left in KNOWN | OPTIONS | OF_TURNS or value in choices.get(left, ()), f"{name}: {word}"
    assert {option.rpartition(".")[2] for option in OPTIONS} <= set(option_names(LOSSES["clip"].function))
    assert {option.rpartition(".")[2] for option in OF_TURNS} <= set(option_names(anchor_state))
    assert not set(foreign.ALL) & set(setting_names())


def test_what_has_no_counterpart_says_why() -> None:
    assert refused("critic.optim.lr=1e-5") == "critic.optim.lr=1e-5 is no setting here (GRPO has no critic)"
    assert "prompts are never cut" in refused("data.truncation=error")
    assert "covey has nothing like it" in refused("actor_rollout_ref.hybrid_engine=True")
    assert refused("mask_token_id=103") == "mask_token_id=103 is no setting here (the model's folder says it)"
    assert "and need not be said" in refused("train.use_kl_to_ref=true")


@pytest.mark.parametrize("name", [*MAPPED, *REFUSED])
def test_every_field_of_trl_is_answered_when_it_is_typed(name: str) -> None:
    if name in {field.rpartition(".")[2] for field in setting_names()}:
        return  # covey has a setting of that name
    from covey.config.names import OTHER_NAMES, RUN_FOLDER

    assert name in {*OTHER_NAMES, *RUN_FOLDER} or name in refused(f"{name}=1")


def test_a_configuration_and_a_script_of_another_system_are_named_for_what_they_are() -> None:
    assert refused("--config-name", "grpo_ifeval") == "--config-name grpo_ifeval is recipe=ifeval here"
    assert refused("--config-name=grpo_gsm8k") == "--config-name grpo_gsm8k is recipe=gsm8k here"
    assert "`covey translate -- COMMAND`" in refused("grpo-sync.py")
    assert "algorithm.kl_coef=0.2" in refused("--kl_beta=0.2")
    assert "model.precision=float16" in refused("--mixed_precision", "fp16")


def test_covey_words_pass_untouched() -> None:
    words = ["recipe=gsm8k", "optimizer.lr=2e-5", "model.name=org/model", "+algorithm.loss_options.tau=1"]
    assert arrange("train", words) == words
