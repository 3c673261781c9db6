"""Types of weights in GGUF files, by precision."""

TYPES = {"float32": "f32", "bfloat16": "bf16"}
