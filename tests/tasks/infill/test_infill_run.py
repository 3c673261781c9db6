"""Whole runs of masked policies: any architecture, any tokenizer, a judge, what watches it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AddedToken, AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast

from covey.cli.main import main
from covey.config.schema import Config
from covey.loop import train
from covey.policy.models.nano import nano_masked_tokenizer
from covey.run.build import build_environment, build_run
from covey.system.waits.timer import PhaseTimer
from covey_preflight.preflight import raise_on_failure, run_checks
from covey_preflight.subject import PreflightContext
from covey_tasks.infill.environment import Infill
from covey_tasks.infill.grammar import is_sentence, sentences
from covey_tasks.infill.settings import InfillConfig

from ...preflight.looked_at import refusal
from ...support.small import equal, logging_as_it_was, rows, small_config, timeless, words

DOCUMENT = ("loss", "pg_loss", "kl_penalty", "mean_reward", "std_reward", "mean_advantage", "mean_kl", "mean_log_prob")


def infill_config(cache: Path, environment: dict[str, Any] | None = None, **changes: Any) -> Config:
    """A run with a judge of a few steps."""
    usual: dict[str, Any] = {
        "model__name": "nano-masked",
        "model__kind": "masked",
        "model__nano_architecture": "modernbert",
        "engine__name": "fill",
        "sampling__temperature": 0.8,
        "sampling__top_p": 0.95,
        "sampling__max_tokens": 40,
        "algorithm__kl_coef": 0.1,
        "algorithm__kl_estimator": "full",
    }
    config = small_config(**usual | changes)
    settings: dict[str, Any] = {
        "num_train": 16,
        "num_test": 4,
        "judge_num_steps": 3,
        "judge_pairs": 4,
        "judge_hidden_size": 16,
        "judge_num_layers": 1,
        "judge_floor": 0.0,
        "judge_cache_dir": str(cache),
        "monitors": ["grammar"],
    }
    config.environment = InfillConfig(**settings | (environment or {}))
    return config


def saved(folder: Path, architecture: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """A random model of transformers' own class, saved as anybody would."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=80,
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )
    torch.manual_seed(0)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def sub_words(takes_blank: bool = True) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer with RoBERTa's habits: special tokens around a text, a mask that takes the blank before."""
    mask = AddedToken("<mask>", lstrip=takes_blank, special=True)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", mask]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sentences(500, "words", held_out=False), trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token=mask,
    )


def word_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer with BERT's habits: small letters, what goes on in a word is another token than what begins one."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=special)
    tokenizer.train_from_iterator(sentences(500, "words", held_out=False), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


@pytest.fixture(scope="module", name="cache")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judges")


def typed(cache: Path) -> list[str]:
    """A run of three steps with the same judge, as typed, but for the policy."""
    plain = words(num_steps=3, sampling__max_tokens=40)
    judge = ("num_steps=3", "pairs=4", "hidden_size=16", "num_layers=1", "floor=0.0", f"cache_dir={cache}")
    return [
        *("environment=infill", "engine=fill", "algorithm=batch_std_reinforce", "model.kind=masked"),
        *(word for word in plain if not word.startswith("model.nano")),
        *(f"environment.judge_{setting}" for setting in judge),
        *("environment.num_train=16", "environment.num_test=4", "environment.monitors=[grammar]"),
    ]


def trained(folder: Path, config: Config) -> list[dict[str, Any]]:
    train(config, folder)
    return rows(folder / "metrics.jsonl", "train")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    last = max((folder / "checkpoints").iterdir())
    return dict(AutoModelForMaskedLM.from_pretrained(last / "policy").state_dict())


# ------------------------------------------------------------------------------------------------ any masked model


@pytest.mark.parametrize(
    ("architecture", "make"),
    [
        ("bert", word_pieces),
        pytest.param("roberta", nano_masked_tokenizer, marks=pytest.mark.slow),
        pytest.param("roberta", sub_words, marks=pytest.mark.slow),
        pytest.param("modernbert", sub_words, marks=pytest.mark.slow),
    ],
)
def test_a_random_model_of_transformers_runs_through_the_same_path(
    architecture: str, make: Any, tmp_path: Path, cache: Path
) -> None:
    """A folder of save_pretrained and a command line: nothing of covey is in it."""
    name = saved(tmp_path / architecture, architecture, make())
    with logging_as_it_was():
        assert main(["train", *typed(cache), f"model.name={name}", f"hydra.run.dir={tmp_path}/run"]) == 0
    found = rows(tmp_path / "run" / "metrics.jsonl", "train")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert all(row["mismatch_max"] < 1e-5 and row["grad_norm"] > 0 for row in found)
    assert found[0]["kl"] < 1e-6 < found[2]["kl"]
    before = dict(AutoModelForMaskedLM.from_pretrained(name).state_dict())
    assert not equal(before, weights(tmp_path / "run"))
    checks = {check["name"]: check for check in json.loads((tmp_path / "run" / "preflight.json").read_text())}
    assert {"frozen models", "KL at the start", "rewards vary"} < set(checks)
    assert set(DOCUMENT) <= set(found[0])


@pytest.mark.long
@pytest.mark.parametrize("make", [sub_words, partial(sub_words, takes_blank=False), word_pieces])
def test_sub_words_are_masked_and_put_back_whole(make: Any, tmp_path: Path, cache: Path) -> None:
    config = infill_config(cache, model__name=saved(tmp_path / "model", "bert", make()))
    environment = build_environment(config)
    assert isinstance(environment, Infill)
    prompts = environment.prompts("train")
    assert len(prompts) == 16
    texts = [environment.completed(prompt, prompt.columns["hidden"]) for prompt in prompts]
    assert all(is_sentence(text) for text in texts)
    assert max(len(text) / len(prompt.columns["input_ids"]) for text, prompt in zip(texts, prompts, strict=True)) > 2


# ------------------------------------------------------------------------------------------------ the run


def test_the_eight_metrics_of_the_document_are_there_by_name(tmp_path: Path, cache: Path) -> None:
    found = trained(tmp_path, infill_config(cache, num_steps=2))
    for row in found:
        assert set(DOCUMENT) <= set(row)
        assert row["loss"] == pytest.approx(row["pg_loss"] + row["kl_penalty"], abs=1e-6)
        assert (row["pg_loss"], row["mean_reward"]) == (row["policy_loss"], row["reward_mean"])
        assert row["kl_penalty"] == pytest.approx(0.1 * row["kl"], abs=1e-6)
        assert abs(row["mean_advantage"]) < 1e-6
        assert row["mean_log_prob"] < -1
        assert 0 < row["std_reward"] < 1


def test_the_seconds_of_a_judge_are_a_phase_of_their_own(tmp_path: Path, cache: Path) -> None:
    train(infill_config(cache, num_steps=1), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["phases"]["judge"]["seconds"] > 0


def test_what_watches_the_judge_is_logged_and_changes_no_weight(tmp_path: Path, cache: Path) -> None:
    alone = trained(tmp_path / "a", infill_config(cache, {"monitors": []}))
    watched = trained(tmp_path / "b", infill_config(cache, {"monitors": ["grammar", "second_judge", "ngram"]}))
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    new = set(watched[0]) - set(alone[0])
    watching = ("grammar", "second_judge", "ngram", "gap")
    assert new == {f"{name}/{part}" for name in ("reward", "reward_std") for part in watching}
    assert watched[0]["reward/gap"] == pytest.approx(watched[0]["reward/judge"] - watched[0]["reward/grammar"])
    assert watched[0]["reward/ngram"] < -0.5
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert set(summary["gain"]["reward_parts"]) == {"judge", "grammar", "second_judge", "ngram", "gap"}
    assert summary["environment"]["monitors"] == ["grammar", "second_judge", "ngram"]
    assert 0 <= summary["environment"]["judge"]["accuracy"] <= 1


def test_a_stopped_run_with_judge_and_stages_resumes_to_the_same_bits(tmp_path: Path, cache: Path) -> None:
    stages = {"mask_ratios": [0.1, 0.5], "masking": "spans"}
    curriculum = {"curriculum__name": "difficulty", "curriculum__promotion_groups": 2, "curriculum__promote_at": 0.01}
    changes: dict[str, Any] = {"evaluation__correct_above": 0.5, "output__save_every": 2, **curriculum}
    whole = trained(tmp_path / "whole", infill_config(cache, stages, num_steps=4, **changes))
    trained(tmp_path / "halves", infill_config(cache, stages, num_steps=2, **changes))
    changes |= {"resume": str(tmp_path / "halves"), "resume_changes": ["num_steps"]}
    again = infill_config(cache, stages, num_steps=4, **changes)
    assert timeless(trained(tmp_path / "halves", again)) == timeless(whole)
    assert equal(weights(tmp_path / "halves"), weights(tmp_path / "whole"))
    assert whole[-1]["completion_length_mean"] > 3 * whole[0]["completion_length_mean"]


def test_a_cold_start_teaches_a_masked_policy_what_stood_in_the_gaps(tmp_path: Path, cache: Path) -> None:
    cold = {"cold_start__enabled": True, "cold_start__num_steps": 30, "cold_start__lr": 1e-2}
    cold |= {"cold_start__num_check_prompts": 4, "cold_start__cache_dir": str(tmp_path / "cold")}
    config = infill_config(cache, num_steps=1, **cold)
    (row,) = trained(tmp_path / "run", config)
    (untaught,) = trained(tmp_path / "plain", infill_config(cache, num_steps=1))
    assert row["mean_log_prob"] > 0.7 * untaught["mean_log_prob"]


# ------------------------------------------------------------------------------------------------ before the first step


@pytest.mark.long
def test_a_judge_below_its_floor_is_refused(cache: Path) -> None:
    line = r"^environment\.judge_floor=0\.99 needs a judge that ranks so many held-out texts above their corrupted"
    with pytest.raises(ValueError, match=line):
        build_environment(infill_config(cache, {"judge_floor": 0.99}))


def test_a_trainable_judge_or_reference_or_constant_rewards_are_refused(cache: Path) -> None:
    config = infill_config(cache)
    environment = build_environment(config)
    assert isinstance(environment, Infill)
    run = build_run(config, environment, PhaseTimer())
    subject = PreflightContext(run, config)
    raise_on_failure(run_checks(subject))
    assert run.trainer.reference is not None
    parameter = next(run.trainer.reference.policy.model.parameters())
    parameter.requires_grad_(True)
    assert "frozen models: the reference has weights that would be trained" in refusal(subject)
    parameter.requires_grad_(False)
    environment._judge._loaded.model.train()
    assert "frozen models: the judge has weights that would be trained" in refusal(subject)
    environment._judge._loaded.model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        parameter.add_(torch.randn(parameter.shape, generator=generator))
    assert "KL at the start: KL to the reference is " in refusal(subject)
    with torch.no_grad():
        parameter.copy_(next(run.policy.model.parameters()))
        for weight in environment._judge._loaded.model.parameters():
            weight.zero_()
    assert "rewards vary: the rewards of 0 of 8 groups vary" in refusal(subject)
    run.close()


@pytest.mark.long
def test_the_judge_verb_trains_a_judge_and_says_how_often_it_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["judge_num_steps=2", "judge_pairs=2", "judge_hidden_size=16", "judge_num_layers=1", "judge_floor=0"]
    settings += ["num_train=4", "num_test=4", f"judge_cache_dir={tmp_path}/judges"]
    named = [f"environment.{setting}" for setting in settings]
    with logging_as_it_was():
        assert main(["judge", "recipe=infill_nano", *named, f"hydra.run.dir={tmp_path}/run"]) == 0
    found = json.loads((tmp_path / "run" / "judge.json").read_text())["judge"]
    assert Path(found["name"]).parent == tmp_path / "judges"
    shown = capsys.readouterr().out.splitlines()
    assert shown.pop(0) == "loading environment=infill"
    assert shown.pop(0).startswith("texts: generated")
    assert shown[0] == "judge: 2 steps of training begin, once for all runs with these texts"
    assert shown[1].startswith("judge: 2 steps done, loss 0.")
    assert shown[2].startswith(f"judge ranks {found['accuracy']:.1%} of held-out texts")
    assert main(["judge", "recipe=arithmetic", f"hydra.run.dir={tmp_path}/other"]) == 2
    assert "covey judge needs environment=infill, got environment=arithmetic" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ what goes together


@pytest.mark.parametrize(
    ("more", "drawn"), [([], (0.8, 0.95)), (["sampling.temperature=1", "sampling.top_p=1"], (1.0, 1.0))]
)
def test_fills_are_drawn_as_the_document_has_it_unless_told_otherwise(
    more: list[str], drawn: tuple[float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "environment=infill", "engine=fill", "model=nano-masked", *more]) == 0
    shown = capsys.readouterr().out
    assert f"temperature: {drawn[0]}\n" in shown
    assert f"top_p: {drawn[1]}\n" in shown


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["model=nano-masked"], "engine.name=native needs model.kind=causal, got model.kind=masked"),
        (["engine=fill"], "engine.name=fill needs model.kind=masked, got model.kind=causal"),
        (
            ["model=nano-masked", "engine=fill"],
            "model.kind=masked needs prompts with masked tokens, got environment=arithmetic",
        ),
        (["environment=infill"], "environment=infill needs model.kind=masked, got model.kind=causal"),
        (
            ["recipe=infill_nano", "model.nano_architecture=qwen2"],
            "model.nano_architecture=qwen2 is none of model.name=nano-masked",
        ),
        (
            ["recipe=infill_nano", "data.path=play.txt"],
            "environment.monitors=[grammar] needs data.path = null, got data.path=play.txt",
        ),
        (
            ["recipe=infill_nano", "environment.mask_ratios=[0.5,1]"],
            "environment.mask_ratios must be numbers between 0 and 1, got [0.5, 1.0]",
        ),
        (
            ["recipe=infill_nano", "environment.monitors=[me]"],
            "environment.monitors must be one of grammar, second_judge, ngram",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", *words]) == 2
    assert f"covey: {line}" in capsys.readouterr().err
