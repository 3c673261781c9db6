"""Data sets as TRL's users hand them over: streamed, several to evaluate on by name, with answers at their end."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from covey.trl import GRPOConfig, GRPOTrainer
from covey_trl.data import splits_of
from covey_trl.rewards import reward_list

from ..support.builders import saved_model


def config(folder: Path, **changed: Any) -> GRPOConfig:
    small: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "preflight": False,
    }
    return GRPOConfig(**small | changed)


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def streamed(folder: Path, count: int) -> Any:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}?"}) for i in range(count)))
    file = str(folder / "rows.jsonl")
    return datasets.load_dataset("json", data_files=file, split="train", streaming=True, cache_dir=str(folder))


def test_a_row_that_is_none_or_lacks_its_prompt_is_refused_in_one_line(tmp_path: Path) -> None:
    trainer = GRPOTrainer(saved_model(tmp_path / "model", "llama"), length, config(tmp_path, max_steps=1), [1] * 8)
    with pytest.raises(ValueError, match=r"^train row 0 must be a mapping of columns, got 1$"):
        trainer.train()
    rows = [{"prompt": "a"}, {"question": "b"}]
    trainer = GRPOTrainer(saved_model(tmp_path / "model", "llama"), length, config(tmp_path, max_steps=1), rows * 4)
    with pytest.raises(ValueError, match=r"^train row 1 has no column 'prompt' \(has: question\)$"):
        trainer.train()


def test_a_stream_gives_as_many_rows_as_are_trained_on(tmp_path: Path) -> None:
    def endless() -> Iterator[dict[str, str]]:
        number = 0
        while True:
            number += 1
            yield {"prompt": f"{number}?"}

    splits, _ = splits_of(endless(), None, config(tmp_path, max_steps=3))
    assert [row["prompt"] for row in splits["train"]] == [f"{number}?" for number in range(1, 7)]
    splits, _ = splits_of(streamed(tmp_path, 5), streamed(tmp_path, 5), config(tmp_path, max_steps=3))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 5, "test": 5}
    for steps in (-1, 0):
        said = f"train_dataset is a stream, so max_steps must say how long to train, got {steps}"
        with pytest.raises(ValueError, match=said):
            splits_of(streamed(tmp_path, 5), None, config(tmp_path, max_steps=steps))
    for wrong in ("rows", 3, {"a": []}):
        with pytest.raises(ValueError, match="train_dataset must be"):
            splits_of(wrong, None, config(tmp_path, max_steps=1))


def test_a_script_with_a_stream_and_several_sets_to_evaluate_on_runs(tmp_path: Path) -> None:
    sets = {"a": datasets.Dataset.from_list([{"prompt": "1?"}, {"prompt": "2?"}]), "b": [{"prompt": "3?"}]}
    args = config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = GRPOTrainer(saved_model(tmp_path / "policy", "llama"), length, args, streamed(tmp_path, 9), sets)
    trainer.train()
    looks = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert len(looks) >= 2
    assert {"eval_a_reward", "eval_b_reward", "eval_a_rewards/length/mean"} <= looks[-1].keys()
    found = trainer.evaluate({"c": [{"prompt": "4?"}], "d": [{"prompt": "5?"}]}, metric_key_prefix="test")
    assert {"test_reward", "test_c_reward", "test_d_reward"} <= found.keys()


def test_a_prompt_that_ends_with_an_answer_is_refused_in_script_terms(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "<think>\n"}]
    trainer = GRPOTrainer(saved_model(tmp_path / "policy", "llama"), length, config(tmp_path), [{"prompt": asked}] * 8)
    with pytest.raises(ValueError, match="has a prompt that ends with the assistant's message") as caught:
        trainer.train()
    assert "TRL opens a new answer behind it; end prompts with the user's message" in str(caught.value)
    assert "data." not in str(caught.value)


def test_verls_function_rewards_a_script(tmp_path: Path) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        assert (data_source, ground_truth, extra_info) == ("mine", "9", {"index": 0})
        return float(len(solution_str))

    row = {"prompt": "5 + 4?", "data_source": "mine", "reward_model": {"ground_truth": "9"}, "extra_info": {"index": 0}}
    args = config(tmp_path, max_steps=1)
    trainer = GRPOTrainer(saved_model(tmp_path / "policy", "llama"), compute_score, args, [row] * 8)
    trainer.train()
    assert "rewards/compute_score/mean" in trainer.state.log_history[0]


@pytest.mark.parametrize("column", ["image", "images"])
def test_a_picture_in_a_row_is_refused(column: str, tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.new("RGB", (2, 2))
    row = {"prompt": "what is this?", column: picture if column == "image" else [picture]}
    trainer = GRPOTrainer(saved_model(tmp_path / "model", "llama"), length, config(tmp_path, max_steps=1), [row] * 8)
    said = f"train row 0 has a picture, film or sound in column '{column}', and policies are trained on text"
    with pytest.raises(ValueError, match=f"^{said}"):
        trainer.train()


async def awaited(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    assert not columns.keys() - {"completion_ids", "trainer_state", "log_extra", "log_metric"}
    return [float(len(text)) for text in completions]


@pytest.mark.long
def test_without_unused_columns_functions_keep_their_names_and_may_be_async(tmp_path: Path) -> None:
    args = config(tmp_path, max_steps=1, remove_unused_columns=True, logging_steps=1)
    rows = [{"prompt": f"{i}?", "answer": "a"} for i in range(8)]
    trainer = GRPOTrainer(saved_model(tmp_path / "model", "llama"), [awaited, length], args, rows)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "reward" in row]
    assert row["rewards/awaited/mean"] == row["rewards/length/mean"] > 0


def half(completions: list[str], **columns: Any) -> list[float]:
    return [math.nan if place % 2 else 0.5 for place in range(len(completions))]


@pytest.mark.long
def test_nan_means_that_a_function_does_not_apply_as_in_trl(tmp_path: Path) -> None:
    args = config(tmp_path, max_steps=1, logging_steps=1)
    model = saved_model(tmp_path / "model", "llama")
    trainer = GRPOTrainer(model, [half, length], args, [{"prompt": f"{i}?"} for i in range(8)])
    trainer.train()
    (step,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open() if '"train"' in line]
    assert step["dropped/unscored_rollouts"] == 0
    assert step["reward/half"] == 0.5
    assert step["sampled_reward_mean"] == pytest.approx(step["reward/length"] + 0.25)


@pytest.mark.parametrize(("tokenizers", "said"), [([None], "has 1 entries for 2"), ([None] * 3, "has 3 entries for 2")])
def test_each_reward_has_a_tokenizer_of_its_own_or_none(tokenizers: list[Any], said: str) -> None:
    assert reward_list([len, "accuracy"], [None, None]) == [len, "accuracy"]
    with pytest.raises(ValueError, match=f"reward_processing_classes {said} reward_funcs"):
        reward_list([len, "accuracy"], tokenizers)
