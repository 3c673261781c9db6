"""Modules as strangers write them train at the first try, or are refused in one line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import covey

LETTERS = "abcdefghijklmnopqrstuvwxyz :0123456789"
SIZE, WIDTH, LENGTH = len(LETTERS), 16, 64
ROWS = [{"prompt": f"say {number}:"} for number in range(12)]
SMALL: dict[str, Any] = {"groups_per_step": 2, "group_size": 4, "max_tokens": 4, "lr": 1e-2, "progress": False}
SMALL |= {"num_steps": 1, "num_samples": 2, "k": [1], "evaluation": {"num_prompts": 2}, "engine__max_rows": 8}
SMALL |= {"environment": {"in_process": True}}


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[number] for number in ids)


def early(completions: Sequence[str], **_: Any) -> list[float]:
    """Letters that stand early in the alphabet."""
    return [sum(SIZE - LETTERS.index(letter) for letter in text) / (4 * SIZE) for text in completions]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None))


class Gpt(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, size, bias=False)
        nn.init.normal_(self.head.weight, std=0.2)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        return x

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.hidden(ids))


class WithInputPos(Gpt):
    """As lit-gpt: optional positions, a maximum length, rotary buffers that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.max_seq_length = 48
        self.register_buffer("cos", torch.ones(48, WIDTH), persistent=False)

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        if idx.shape[1] > self.max_seq_length:
            raise ValueError(f"Cannot forward sequence of length {idx.shape[1]}")
        return self.head(self.hidden(idx) * self.cos[: idx.shape[1]])


class StateRequired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(SIZE, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(WIDTH, SIZE)

    def forward(self, ids: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        out, hidden = self.cells(self.table(ids), hidden)
        return self.head(out), hidden


class MaskRequired(Gpt):
    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        return self.head(self.hidden(ids, mask))


class PaddingRequired(Gpt):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        causal = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril().bool()
        return self.head(self.hidden(input_ids, causal & attention_mask[:, None, :].bool()))


class ComplexPositions(Gpt):
    """As the first Llama: a required position, complex rotations as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(float(LENGTH)), 1e4 ** (-torch.arange(0, WIDTH, 2) / WIDTH))
        self.turns = torch.polar(torch.ones_like(angle), angle)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        x = self.hidden(tokens)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * self.turns[start_pos : start_pos + x.shape[1]]).flatten(2).type_as(x)
        return self.head(x + turned).float()


class Named(Gpt):
    def forward(self, ids: Tensor) -> dict[str, Any]:
        return {"loss": None, "out": super().forward(ids)}


@dataclass
class Output:
    loss: Any
    lm_logits: Tensor


class Recorded(Gpt):
    def forward(self, ids: Tensor) -> Output:
        return Output(None, super().forward(ids))


class HiddenFirst(Gpt):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.hidden(ids)
        return x, self.head(x)


class LossInTraining(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:]) if self.training else logits


class WritesItsInput(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        ids.clamp_(max=SIZE - 1).remainder_(SIZE)
        logits = super().forward(ids)
        logits /= 1.5
        return logits


class KeepsItsOutput(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        self.last = super().forward(ids)
        return self.last


class ReadsAnothersWeight(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(ids) @ self.head.weight.T


class ChecksTypes(Gpt):
    """As nanochat: weights in two types, buffers whose type is asserted, a scalar among the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.to(torch.bfloat16), self.places.to(torch.bfloat16)
        self.register_buffer("cos", torch.ones(LENGTH, WIDTH, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("sin", torch.zeros(LENGTH, WIDTH), persistent=False)
        self.smear = nn.Parameter(torch.ones(()))

    def forward(self, idx: Tensor, targets: Tensor | None = None, kv_cache: Any = None) -> Tensor:
        assert (self.cos.dtype, self.sin.dtype) == (torch.bfloat16, torch.float32)
        x = (self.tokens(idx) + self.places.weight[: idx.shape[1]]).float()
        x = torch.cat([x[:, :1], x[:, 1:] + self.smear * x[:, :-1]], dim=1)
        for block in self.blocks:
            x = block(x * self.cos[: idx.shape[1]] + self.sin[: idx.shape[1]])
        logits = 15 * torch.tanh(F.linear(x, self.head.weight.to(x.dtype)) / 15)
        return logits if targets is None else F.cross_entropy(logits.mT, targets)


class Normed(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden(ids).mT).mT)


def compiled() -> nn.Module:
    return torch.compile(Gpt())  # type: ignore[return-value] # a module with the same methods


def parallel() -> nn.Module:
    return nn.DataParallel(Gpt())


def wide() -> nn.Module:
    return Gpt(size=64)


def half() -> nn.Module:
    return Gpt().bfloat16()


STRANGE = [WithInputPos, StateRequired, MaskRequired, PaddingRequired, ComplexPositions, Named, Recorded, HiddenFirst]
STRANGE += [LossInTraining, WritesItsInput, KeepsItsOutput, ReadsAnothersWeight, ChecksTypes, Normed]


@pytest.mark.long
@pytest.mark.parametrize("make", [*STRANGE, compiled, parallel, wide, half], ids=lambda make: make.__name__)
def test_a_strangers_module_trains_at_the_first_try(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    how = {**SMALL, "temperature": 3.0} if make is wide else SMALL
    result = covey.train(model, early, ROWS, tokenizer=(encode, decode), folder=tmp_path, **how)
    assert any(not torch.equal(weight, before[name].to(weight.dtype)) for name, weight in model.state_dict().items())
    assert max(row["mismatch"] for row in result.rows) < 1e-6
    assert len(result.sample("say 7:", n=2)) == 2


@pytest.mark.parametrize("make", [ReadsAnothersWeight, ChecksTypes, Normed], ids=lambda make: make.__name__)
@pytest.mark.parametrize("how", [{"precision": "float64"}, {"precision": "bfloat16"}, {"lora": 2}], ids=str)
def test_the_checks_compute_it_in_other_types_and_with_adapters(
    make: Callable[[], nn.Module], how: dict[str, Any]
) -> None:
    from covey.policy.models.loading import policy_in_memory
    from covey.policy.own import own_model
    from covey.policy.own_tokenizer import own_tokenizer
    from covey.policy.plain import plain_model
    from covey.policy.settings import ModelConfig

    torch.manual_seed(0)
    settings = ModelConfig(device="cpu", precision=how.get("precision", "bfloat16"), lora_rank=how.get("lora", 0))
    policy = policy_in_memory(own_model(make()), own_tokenizer((encode, decode), SIZE), settings, seed=0)
    text = encode("say 7: four")
    exact = plain_model(policy, dtype=torch.float64).logits(text, range(len(text)))
    single = plain_model(policy).logits(text, range(len(text)))
    assert exact.dtype == torch.float64
    assert float((exact - single).detach().abs().max()) < 1e-5
    exact.sum().backward()
    assert all(weight.grad is not None for weight in policy.model.parameters() if weight.requires_grad)


def test_the_checks_compute_without_kernels_of_covey() -> None:
    from covey.policy.kernels.linear import OneDnnLinear, use_onednn
    from covey.policy.own import own_model

    model = own_model(Gpt())
    use_onednn(model)
    assert OneDnnLinear in {type(part) for part in model.modules()}
    assert OneDnnLinear not in {type(part) for part in model.skeleton(torch.float64).modules()}


class SequenceFirst(StateRequired):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH)

    def forward(self, ids: Tensor, hidden: Any = None) -> tuple[Tensor, Any]:
        return super().forward(ids, hidden)


class WithoutGradient(Gpt):
    @torch.inference_mode()
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


class WritesWhatItNeeds(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        ids.zero_()
        return logits


class OneLength(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] == LENGTH, f"needs {LENGTH} tokens"
        return super().forward(ids)


class VocabularyFirst(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mT


class NotANumber(Gpt):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.head.weight, torch.nan)


def unloaded() -> nn.Module:
    with torch.device("meta"):
        return Gpt()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (SequenceFirst, "SequenceFirst mixes rows"),
        (WithoutGradient, "WithoutGradient gives none: its forward runs in no_grad or inference_mode"),
        (WritesWhatItNeeds, "WritesWhatItNeeds gives none: RuntimeError: one of the variables needed for gradient"),
        (OneLength, "OneLength raises AssertionError: needs 64 tokens"),
        (VocabularyFirst, r"VocabularyFirst returns \(1, 38, 3\) of \(1, 3\)"),
        (NotANumber, "NotANumber returns some that are not: are its weights loaded"),
        (unloaded, "Gpt has some on the meta device: load them first"),
    ],
)
def test_what_a_module_lacks_is_said_in_one_line(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        covey.train(make(), early, ROWS, tokenizer=(encode, decode), **SMALL)
    assert "\n" not in str(refused.value)


def test_vllm_knows_no_module_of_ones_own() -> None:
    how = {**SMALL, "engine": {"name": "vllm", "url": "http://localhost:8000"}, "engine__max_rows": None}
    with pytest.raises(ValueError, match=r"engine\.name=vllm needs a model by name or folder, got one in memory"):
        covey.train(Gpt(), early, ROWS, tokenizer=(encode, decode), **{k: v for k, v in how.items() if v is not None})


def test_adapters_need_linear_layers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.lora_rank=2 needs linear layers, StateRequired has none"):
        covey.train(StateRequired(), early, ROWS, tokenizer=(encode, decode), folder=tmp_path, lora_rank=2, **SMALL)


def test_a_vocabulary_smaller_than_the_tokenizers_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token 3. of prompt train-. has no embedding, there are 30"):
        covey.train(Gpt(size=30), early, ROWS, tokenizer=(encode, decode), folder=tmp_path, **SMALL)
