"""Settings of TorchRL, verl, TRL and the documents are answered with covey's, and with its values."""

import random
import re

import pytest

from covey.cli.command_line import arrange
from covey.cli.help import group_choices
from covey.config.schema import setting_names
from covey_trl import translation as foreign
from covey_trl.fields import MAPPED, REFUSED
from covey_trl.translation.command import translate
from covey_trl.translation.counterparts import CONVERT, system

KNOWN = {*setting_names(), "model.name", "environment"}
OPTIONS = ("algorithm.loss_options.", "algorithm.turn_credit_options.", "algorithm.advantage_options.", "environment.")
TABLES = (*foreign.SYSTEMS, "trl")


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
        ("env.dataset=ifeval", "recipe=torchrl_ifeval"),
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
        ("training.kl_penalty_weight=0.001", "algorithm.kl_coef=0.001"),
        ("problem=FizzBuzz", "recipe=fizzbuzz"),
        ("problem=letters", "recipe=code environment.problem=letters"),
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


@pytest.mark.parametrize("known", ["hydra.run.dir=a", "hydra/launcher=ray", "algorithm.loss_options.eps_low=0.1"])
def test_what_is_known_is_not_called_unknown_beside_a_foreign_setting(known: str) -> None:
    assert refused("max_steps=4", known) == refused("max_steps=4")


def test_numbers_that_depend_on_each_other_are_computed_from_all_that_was_typed() -> None:
    line = refused("train.total_dialog_turns=100_000", "train.dialog_turns_per_batch=64", "env.repeats=8")
    assert "is total_rollouts=100000 here" in line
    assert "train.dialog_turns_per_batch=64 env.repeats=8 is groups_per_step=8 group_size=8" in line


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
    assert {one.answer.words for one in found if one is not None} == {(words,)}


EVERY_ROW = [(name, setting) for name in TABLES for setting in system(name).settings]


@pytest.mark.parametrize(("name", "setting"), EVERY_ROW)
def test_every_row_of_a_table_names_settings_and_choices_that_there_are(name: str, setting: str) -> None:
    one = system(name)
    row = one.settings[setting]
    of_maps = [word for found in one.maps.values() for word in found] if "|" in row.words else []
    answers = [row.answer(value, one.maps) for value in (*(row.values or ()), *of_maps, "1", "a,b")]
    assert any(found.words or found.note for found in answers) or row.values, setting
    for word in (word for found in answers for word in found.words):
        assert_is_a_word(word)
    assert setting not in setting_names() or setting in one.defaults or name == "trl", "covey has it by this name"


def assert_is_a_word(word: str) -> None:
    left, equals, value = word.partition("=")
    assert equals
    known = left in KNOWN or left.startswith(OPTIONS) or value in group_choices().get(left, ())
    assert known or left in ("rewards", "hydra.run.dir"), word
    assert "<" not in word
    assert "{}" not in word


@pytest.mark.parametrize("name", TABLES)
def test_every_decision_names_what_there_is_and_reads_what_it_looks_at(name: str) -> None:
    one = system(name)
    for decision in one.decisions:
        shorts = {*decision.reads, *decision.uses}
        assert all(set(case) <= {"when", "words", "note"} for case in decision.cases)
        assert {short for case in decision.cases for short in case.get("when", {})} <= shorts
        for case in decision.cases:
            for word in (case.get("words") or "").split():
                left, _, value = word.partition("=")
                assert left in KNOWN or left in ("recipe", "engine", "hydra.run.dir") or left.startswith(OPTIONS), word
                assert "<" in value or left not in group_choices() or value in group_choices()[left], word
                for hole in re.findall("<([^<>]*)>", value):
                    expression, _, by = hole.partition("|")
                    assert set(re.findall(r"[a-z_]\w*", expression)) <= shorts, hole
                    assert by in {"", *one.maps, *CONVERT}, hole
        assert decision.answer({}, one.defaults, one.maps) is not None
    for setting in {*one.defaults, *one.aliases.values(), *(n for given in one.variants.values() for n in given)}:
        assert one.has(setting) or setting in setting_names(), setting


@pytest.mark.parametrize("name", ["torchrl", "verl", "openrlhf", "prime_rl"])
@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.slow)])
def test_two_words_of_a_system_mean_the_same_in_either_order(name: str, count: int) -> None:
    one = system(name)
    samples = {setting: [*(row.values or ()), "1", "0.5"][:3] for setting, row in one.settings.items()}
    names = sorted(samples)
    chance = random.Random(3)
    for _ in range(count):
        first, second = chance.sample(names, 2)
        given = {first: chance.choice(samples[first]), second: chance.choice(samples[second])}
        orders = [given, dict(reversed(given.items()))]
        words = [{w.partition("=")[0]: w for a in foreign.answers(one, g) for w in a.answer.words} for g in orders]
        assert words[0] == words[1], given


def test_a_mode_with_devices_of_its_own_is_answered_with_what_takes_them() -> None:
    line = refused("mode=sync", "train_model.num_devices=2", "ref_model.num_devices=2")
    assert "mode=sync is source=ray max_staleness=0 here" in line
    assert "train_model.num_devices=2 is devices.trainer=2 here" in line
    assert "ref_model.num_devices=2 is devices.reference=2 here" in line


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("batch_size=16 group_size=8", "groups_per_step=16"),
        ("mini_batch_size=4 gradient_accumulation_steps=4", "mini_batch_rollouts=16"),
        ("batch_size=128 group_size=4 mini_batch_size=8", "groups_per_step=32 mini_batch_rollouts=8"),
        (
            "mini_batch_size=4 group_size=4 gradient_accumulation_steps=4 batch_size=128",
            "groups_per_step=32 mini_batch_rollouts=16",
        ),
    ],
)
def test_batches_beside_mini_batches_count_completions_in_any_order(typed: str, words: str) -> None:
    for order in (typed.split(), typed.split()[::-1]):
        assert f" is {words} here" in refused(*order)
        assert set(words.split()) <= {*translate(order).words.values()}


def test_names_that_adapters_have_everywhere_tell_no_program() -> None:
    words = ["load_in_4bit=true", "lora_alpha=32", "lora_dropout=0.05", "r=16"]
    assert foreign.system_of(words, dict(word.split("=") for word in words)) is None
    assert translate(words).words.keys() <= {"model.load_in_4bit", "model.lora_rank", "model.lora_dropout"}


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
    from covey.config.names import RUN_FOLDER, other_names

    assert name in {*other_names(), *RUN_FOLDER} or name in refused(f"{name}=1")


def test_a_configuration_and_a_script_of_another_system_are_named_for_what_they_are() -> None:
    assert refused("--config-name", "grpo_ifeval") == "--config-name grpo_ifeval is recipe=torchrl_ifeval here"
    assert refused("--config-name=grpo_gsm8k") == "--config-name grpo_gsm8k is recipe=torchrl_gsm8k here"
    assert "`covey translate -- COMMAND`" in refused("grpo-sync.py")
    assert "`covey translate -- COMMAND`" in refused("grpo-sync-multi-node.sbatch")
    assert "algorithm.kl_coef=0.2" in refused("--kl_beta=0.2")
    assert "model.precision=float16" in refused("--mixed_precision", "fp16")


def test_covey_words_pass_untouched() -> None:
    words = ["recipe=gsm8k", "optimizer.lr=2e-5", "model.name=org/model", "+algorithm.loss_options.tau=1"]
    assert arrange("train", words) == words
