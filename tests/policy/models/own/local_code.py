"""A folder with an architecture that transformers does not know: its code lies beside its weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from covey.policy.models.nano import nano_tokenizer

CONFIGURATION = """
from transformers import PreTrainedConfig


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_of_its_own"

    def __init__(self, vocab_size=64, hidden_size=32, num_hidden_layers=2, max_position_embeddings=128, **more):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.max_position_embeddings, self.num_attention_heads = max_position_embeddings, 1
        super().__init__(**more)
"""
LAYERS = """
import torch
from torch import nn
from torch.nn import functional as F


class Mixer(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.norm, self.mix, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        angle = torch.outer(torch.arange(length), 100.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def turned(self, x):
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True))
"""
MODELING = """
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_tiny import TinyConfig
from .layers_tiny import Mixer

WAS_RUN = True


class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = [Mixer(config.hidden_size, config.max_position_embeddings) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=None, **more):
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutputWithPast(logits=self.head(x))
"""
FILES = {"configuration_tiny.py": CONFIGURATION, "layers_tiny.py": LAYERS, "modeling_tiny.py": MODELING}
AUTO_MAP = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}


def write_tiny(folder: Path, witness: Path | None = None) -> Path:
    """Write the folder; code that runs leaves a file at `witness`."""
    folder.mkdir(parents=True)
    tokenizer = nano_tokenizer()
    tokenizer.save_pretrained(folder)
    leaves = "" if witness is None else f"\nopen({str(witness)!r}, 'w').close()\n"
    for name, text in FILES.items():
        (folder / name).write_text(text.lstrip() + leaves, encoding="utf-8")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}
    kind = {"model_type": "tiny_of_its_own", "architectures": ["TinyForCausalLM"], "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(sizes | kind), encoding="utf-8")
    made = torch.Generator().manual_seed(0)
    shapes = {"tokens.weight": (len(tokenizer), 32), "head.weight": (len(tokenizer), 32)}
    for layer in range(2):
        shapes |= {f"layers.{layer}.norm.weight": (32,), f"layers.{layer}.mix.weight": (96, 32)}
        shapes |= {f"layers.{layer}.mix.bias": (96,), f"layers.{layer}.out.weight": (32, 32)}
        shapes |= {f"layers.{layer}.out.bias": (32,)}
    weights = {name: torch.randn(shape, generator=made) * 0.2 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
