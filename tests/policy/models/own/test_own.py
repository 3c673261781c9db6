"""Whatever reads token ids and gives logits trains at the first try, or is refused by name."""

import runpy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import covey

from ....docs.test_docs import example_files
from ....support.processes import as_job_steps

LETTERS = "abcdefghijklmnopqrstuvwxyz :0123456789"
SIZE = len(LETTERS)
SMALL: dict[str, Any] = {"groups_per_step": 2, "group_size": 4, "max_tokens": 4, "lr": 1e-2, "progress": False}
SMALL |= {
    "evaluation": {"num_prompts": 2},
    "num_samples": 2,
    "k": [1, 2],
    "engine__max_rows": 8,
    "environment": {"in_process": True},
}


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[number] for number in ids)


class Block(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("mask", torch.ones(length, length).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        score = (q @ k.mT / 4.0).masked_fill(~self.mask[:length, :length], -torch.inf)
        return x + self.drop(self.out(score.softmax(dim=-1) @ v))


class Gpt(nn.Module):
    """Like nanoGPT: tied weights, learnt positions, dropout, a length beyond which it fails."""

    def __init__(self, length: int = 16, width: int = 16, tied: bool = True) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.places = nn.Embedding(SIZE, width), nn.Embedding(length, width)
        self.register_buffer("place", torch.arange(length))
        self.blocks = nn.ModuleList(Block(width, length) for _ in range(2))
        self.head = nn.Linear(width, SIZE, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.head.weight, std=0.2)  # else it says its last token for ever

    def hidden(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] <= self.length, f"cannot read {ids.shape[1]} tokens, only {self.length}"
        x = self.tokens(ids) + self.places(self.place[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.hidden(ids))


class LastOnly(Gpt):
    """Logits of the last position, unless there are targets; the loss beside them."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.hidden(idx)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Named(Gpt):
    def forward(self, ids: Tensor) -> Any:
        return SimpleNamespace(loss=None, logits=super().forward(ids))


class Half(Gpt):
    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids).half()


class Recurrent(nn.Module):
    """No attention, no limit; its state beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells, self.head = (
            nn.Embedding(SIZE, 16),
            nn.GRU(16, 16, batch_first=True),
            nn.Linear(16, SIZE),
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.cells(self.table(ids))
        return self.head(out), state


class Convolved(nn.Module):
    """One-hot inputs, so no embedding; dropout by number; norms over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(SIZE, 24, 3), nn.BatchNorm1d(24), nn.Conv1d(24, SIZE, 1)
        self.p = 0.2

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(F.one_hot(x, SIZE).float().mT, (2, 0))
        kept = F.dropout(self.norm(self.conv(padded)).relu(), self.p, self.training)
        return self.head(kept).mT


class Cached(Gpt):
    """Keys of what it read, if asked: here all hidden inputs."""

    def forward(self, ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        read = ids if past_key_values is None else torch.cat([past_key_values[0], ids], dim=1)
        logits = super().forward(read)[:, -ids.shape[1] :]
        return (logits, (read,)) if use_cache else logits


def early(completions: Sequence[str], **_: Any) -> list[float]:
    """Letters that stand early in the alphabet: any two answers differ."""
    return [sum(SIZE - LETTERS.index(letter) for letter in text) / (4 * SIZE) for text in completions]


ROWS = [{"prompt": f"say {number}:"} for number in range(12)]


def trained(model: nn.Module, folder: Path, **changes: Any) -> covey.Result:
    return covey.train(
        model, early, ROWS, tokenizer=(encode, decode), folder=folder, **{**SMALL, "num_steps": 2, **changes}
    )


STRANGERS: list[Callable[[], nn.Module]] = [Gpt, LastOnly, Named, Half, Recurrent, Convolved, Cached]


@pytest.mark.long
@pytest.mark.parametrize("make", STRANGERS, ids=lambda make: make.__name__)
def test_a_module_trains_at_the_first_try(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    result = trained(model, tmp_path)
    assert result.status == "completed"
    assert result.model is model
    assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert max(row["mismatch"] for row in result.rows if row.get("mismatch") is not None) < (
        1e-3 if make is Half else 1e-5
    )
    fresh = make()
    fresh.load_state_dict(load_file(result.save(tmp_path / "saved") / "model.safetensors"))
    ids = torch.tensor([encode("say 3:")])
    model.eval(), fresh.eval()
    torch.testing.assert_close(fresh(ids), model(ids)) if make is Gpt else None
    assert isinstance(result.sample("say 7:"), list)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}])
def test_a_resumed_run_of_a_module_ends_as_one_never_stopped(changes: dict[str, Any], tmp_path: Path) -> None:
    def run(**where: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        how = {**SMALL, **changes, "save_every": 2, "num_steps": 4, **where}
        result = covey.train(Gpt(), early, ROWS, tokenizer=(encode, decode), **how)
        return {name: weight.clone() for name, weight in result.model.state_dict().items()}

    whole = run(folder=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    resumed = run(resume=tmp_path / "run")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}])
def test_two_processes_train_a_module_shared_out(changes: dict[str, Any], tmp_path: Path) -> None:
    def run(**how: Any) -> list[float]:
        torch.manual_seed(0)
        result = trained(Gpt(), tmp_path / how.pop("name"), **changes, **how)
        assert len(result.sample("say 7:")[0]) <= 4
        return [row["grad_norm"] for row in result.rows]

    shared = as_job_steps(lambda: run(name="shared", parallel__strategy="fsdp"))
    assert shared[0] == shared[1]
    assert shared[0] == pytest.approx(run(name="alone"), rel=1e-4)


@pytest.mark.long
def test_the_page_trains_a_small_gpt_in_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in example_files("docs/use/own_model.md").items():
        Path(name).write_text(content, encoding="utf-8")
    torch.manual_seed(0)
    result = runpy.run_path("small_gpt.py")["main"]()
    rewards = [row["sampled_reward_mean"] for row in result.rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert torch.load("small_gpt.pth").keys() == result.model.state_dict().keys()


class Bidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(SIZE, 16), nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, SIZE)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cells(self.table(ids))[0])


class Probabilities(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).softmax(dim=-1)


class OneLogit(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)[:, -1]


class Broken(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        raise RuntimeError("needs a second argument")


class Noisy(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return logits + torch.rand_like(logits)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Bidirectional, "Bidirectional sees what follows"),
        (Probabilities, "Probabilities returns probabilities"),
        (OneLogit, r"OneLogit returns \(1, 38\) of \(1, 3\)"),
        (Broken, "Broken raises RuntimeError: needs a second argument"),
        (Noisy, "Noisy"),
        (nn.Identity, "Identity has none"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(make: Callable[[], nn.Module], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        trained(make(), tmp_path)
    assert "\n" not in str(refused.value)


def test_texts_end_where_the_module_does(tmp_path: Path) -> None:
    with covey.build(Gpt(length=13), early, ROWS, tokenizer=(encode, decode), **SMALL) as parts:
        assert parts.policy.max_length == 13
    with pytest.raises(ValueError, match="13"):
        trained(Gpt(length=13), tmp_path, max_tokens=64)


@pytest.mark.parametrize("given", [None, "abc", (encode,), object()])
def test_a_tokenizer_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        covey.train(Gpt(), early, ROWS, tokenizer=given, num_steps=1)


def test_a_prompt_that_encode_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="raises ValueError: substring not found"):
        covey.train(
            Gpt(),
            early,
            [{"prompt": f"SAY {i}:"} for i in range(4)],
            tokenizer=(encode, decode),
            folder=tmp_path,
            **SMALL,
        )
