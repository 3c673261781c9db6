"""Stand-ins for checkouts of small-model communities: packages of the same interfaces, written anew and small."""

import json
from pathlib import Path

from covey.policy.models.nano import nano_tokenizer

LAYER = """
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, past=None):
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        mask = torch.ones(q.shape[1], k.shape[1], device=x.device).tril(k.shape[1] - q.shape[1]).bool()
        return x + self.out(F.scaled_dot_product_attention(q, k, v, mask)), (k, v)
"""
BOOK = """
from torch import arange, nn

from .layer import Layer


class GPTModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.pos_emb = nn.Embedding(cfg["context_length"], cfg["emb_dim"])
        self.trf_blocks = nn.ModuleList(Layer(cfg["emb_dim"]) for _ in range(cfg["n_layers"]))
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)

    def forward(self, in_idx):
        x = self.tok_emb(in_idx) + self.pos_emb(arange(in_idx.shape[1], device=in_idx.device))
        for block in self.trf_blocks:
            x, _ = block(x)
        return self.out_head(x)
"""
TIKTOKEN = '''
class Encoding:
    """Bytes, and marks behind them, in place of learnt pairs of bytes."""

    def __init__(self, specials=("<|endoftext|>",)):
        self.specials = list(specials)

    @property
    def n_vocab(self):
        return 256 + len(self.specials)

    @property
    def eot_token(self):
        return 256

    def encode(self, text, allowed_special=()):
        ids, marks = [], self.specials if allowed_special == "all" else []
        while text:
            mark = next((one for one in marks if text.startswith(one)), None)
            taken = mark or text[0]
            ids += [256 + self.specials.index(mark)] if mark else list(taken.encode())
            text = text[len(taken):]
        return ids

    def encode_single_token(self, text):
        return 256 + self.specials.index(text)

    def decode(self, ids):
        parts = [bytes([one]) if one < 256 else self.specials[one - 256].encode() for one in ids]
        return b"".join(parts).decode("utf-8", "replace")


def get_encoding(name):
    return Encoding()
'''
NANOCHAT_GPT = '''
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .layer import Layer


@dataclass
class GPTConfig:
    sequence_len: int = 64
    vocab_size: int = 256
    n_layer: int = 2
    n_embd: int = 32
    window_pattern: str = "SL"


class GPT(nn.Module):
    """Values of tokens, smeared inputs, capped logits; a padded vocabulary; positions in a buffer of asserted type."""

    def __init__(self, config):
        super().__init__()
        self.config, padded = config, (config.vocab_size + 63) // 64 * 64
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(padded, config.n_embd), "h": nn.ModuleList(Layer(config.n_embd) for _ in range(2))
        })
        self.value_embeds = nn.ModuleDict({"1": nn.Embedding(padded, config.n_embd)})
        self.smear_lambda, self.resid_lambdas = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(2))
        self.lm_head = nn.Linear(config.n_embd, padded, bias=False)
        self.register_buffer("cos", torch.ones(config.sequence_len, config.n_embd), persistent=False)

    def init_weights(self):
        self.cos = torch.linspace(0.5, 1.0, self.config.sequence_len)[:, None].expand(-1, self.config.n_embd).clone()

    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        assert idx.shape[1] <= self.cos.shape[0], f"sequence of {idx.shape[1]} is longer than {self.cos.shape[0]}"
        assert self.cos.dtype == torch.float32
        x = F.rms_norm(self.transformer.wte(idx), (self.config.n_embd,)) * self.cos[: idx.shape[1]]
        x = torch.cat([x[:, :1], x[:, 1:] + self.smear_lambda * x[:, :-1]], dim=1)
        for place, block in enumerate(self.transformer.h):
            x = x * self.resid_lambdas[place]
            if str(place) in self.value_embeds:
                x = x + self.value_embeds[str(place)](idx)
            x, _ = block(x)
        logits = 15 * torch.tanh(self.lm_head(x)[..., : self.config.vocab_size].float() / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=loss_reduction)
'''
NANOCHAT_CHECKPOINTS = """
import json
import pickle
from pathlib import Path

import torch

from nanochat.gpt import GPT, GPTConfig


class Tokenizer:
    def __init__(self, enc):
        self.enc, self.decode, self.encode_special = enc, enc.decode, enc.encode_single_token


def find_last_step(checkpoint_dir):
    return max(int(path.stem.split("_")[1]) for path in Path(checkpoint_dir).glob("model_*.pt"))


def build_model(checkpoint_dir, step, device, phase):
    weights = torch.load(Path(checkpoint_dir) / f"model_{step:06d}.pt", map_location=device)
    meta = json.loads((Path(checkpoint_dir) / f"meta_{step:06d}.json").read_text())
    with torch.device("meta"):
        model = GPT(GPTConfig(**meta["model_config"]))
    model.to_empty(device=device)
    model.init_weights()
    weights = {name.removeprefix("_orig_mod."): one.float() for name, one in weights.items()}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.train(phase == "train"), Tokenizer(pickle.loads(Path("tokenizer.pkl").read_bytes())), meta
"""
MINIMIND = """
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from .layer import Layer


class MiniMindConfig(PretrainedConfig):
    model_type = "minimind"

    def __init__(self, hidden_size=32, num_hidden_layers=2, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 32, 2, 1
        self.vocab_size, self.max_position_embeddings = kwargs.get("vocab_size", SIZE), 128


class MiniMindModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config.hidden_size) for _ in range(config.num_hidden_layers))

    def forward(self, input_ids, past_key_values=None):
        x, presents = self.embed_tokens(input_ids), []
        for layer, past in zip(self.layers, past_key_values or [None] * len(self.layers)):
            x, present = layer(x, past)
            presents.append(present)
        return x, presents


class MiniMindForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MiniMindConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config=None):
        super().__init__(config or MiniMindConfig())
        self.model = MiniMindModel(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.model.embed_tokens.weight = self.lm_head.weight
        self.post_init()

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False, labels=None, **kwargs):
        if hasattr(past_key_values, "layers"):
            past_key_values = None
        hidden, presents = self.model(input_ids, past_key_values)
        logits, kept = self.lm_head(hidden), presents if use_cache else None
        return MoeCausalLMOutputWithPast(logits=logits, past_key_values=kept, hidden_states=hidden)
"""
REWARDS = """
def low(completions, **columns):
    return [sum(map(ord, str(completion))) % 97 / 97 for completion in completions]
"""
CHAT_MARKS = ["<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"]
BEGINNINGS = {
    "book_policy": """
import torch
from llms_from_scratch.ch04 import GPTModel
torch.manual_seed(0)
sizes = {"vocab_size": 257, "context_length": 64, "emb_dim": 32, "n_layers": 2}
torch.save(GPTModel(sizes).state_dict(), "weights")
""",
    "nanochat_policy": f"""
import json, os, pickle
import torch
from tiktoken import Encoding
from nanochat.gpt import GPT, GPTConfig
torch.manual_seed(0)
enc = Encoding({CHAT_MARKS!r})
open("tokenizer.pkl", "wb").write(pickle.dumps(enc))
sizes = {{"sequence_len": 64, "vocab_size": enc.n_vocab, "n_layer": 2, "n_embd": 32, "window_pattern": "SL"}}
os.mkdir("weights")
saved = {{f"_orig_mod.{{name}}": one.bfloat16() for name, one in GPT(GPTConfig(**sizes)).state_dict().items()}}
torch.save(saved, "weights/model_000020.pt")
open("weights/optim_000020_rank0.pt", "wb").write(b"never read")
open("weights/meta_000020.json", "w").write(json.dumps({{"model_config": sizes, "step": 20}}))
""",
    "minimind_policy": """
import torch
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
torch.manual_seed(0)
model = MiniMindForCausalLM(MiniMindConfig())
torch.save({name: one.half() for name, one in model.state_dict().items()}, "weights")
""",
}
"""Page's file -> a program that writes the checkpoint `weights` in its checkout."""


def write_checkout(folder: Path, policy: str) -> None:
    """Write packages and reward functions into a folder, where the page's file lies."""
    tokenizer = nano_tokenizer()
    packages = {
        "llms_from_scratch": {"ch04.py": BOOK},
        "nanochat": {"gpt.py": NANOCHAT_GPT, "checkpoint_manager.py": NANOCHAT_CHECKPOINTS},
        "model": {"model_minimind.py": f"SIZE = {len(tokenizer)}\n{MINIMIND}"},
    }
    for name, files in packages.items():
        (folder / name).mkdir()
        for file, text in {"__init__.py": "", "layer.py": LAYER, **files}.items():
            (folder / name / file).write_text(text.lstrip(), encoding="utf-8")
    tokenizer.save_pretrained(folder / "model")
    (folder / "tiktoken.py").write_text(TIKTOKEN.lstrip(), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS.lstrip(), encoding="utf-8")
    said = [f"say {number}" for number in range(12)]
    chat = [[{"role": "user", "content": text}] for text in said]
    rows = [{"prompt": prompt} for prompt in (chat if policy == "nanochat_policy" else said)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
