"""Configurations of every causal language model that the installed transformers knows, a few thousand weights each."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 260
"""That of the nano tokenizer: four special tokens and the bytes."""
MAX_LENGTH = 128
WINDOW = 6
"""Shorter than the texts that are compared, so that layers with a window are seen to have it."""
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "n_ctx", "context_length")
SIZES: dict[str, int] = {
    **dict.fromkeys(LENGTHS, MAX_LENGTH),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("window_size", "attention_chunk_size", "chunk_size", "index_topk"), WINDOW),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "emb_dim"), 32),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "feed_forward_size", "d_inner", "dim_ff"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dff", "intermediate_size_mlp", "ffn_inner_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("dense_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_channels", "swa_head_dim", "attention_head_dim", "dim_head"), 16),
    **{"qk_head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **{"n_group": 1, "topk_group": 1, "num_expert_group": 1, "first_k_dense_replace": 1, "rotary_dim": 4},
    **{"hidden_size_per_layer_input": 16, "laurel_rank": 8, "num_kv_shared_layers": 0, "max_window_layers": 1},
    **{"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 8, "mamba_d_ssm": 64},
    **{"state_size": 8, "time_step_rank": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"index_n_heads": 16, "index_head_dim": 16, "query_pre_attn_scalar": 16, "dim_model_base": 16},
}
"""Whatever a configuration calls its sizes."""
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3, "decoder_start_token_id": 1}

MLA = {"head_dim": 8, "num_key_value_heads": 4}
"""Of multi-head latent attention, the part of a head that is turned."""
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
INDEXED = {**HYBRID, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": WINDOW}
INDEXED |= {"indexer_compress_ratio": 2, "ngram_vocab_size_base": 500, "hc_lowrank": 8}
DOTS = {**MLA, "num_attention_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
DOTS |= {"swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 16}
DOTS |= {"swa_q_lora_rank": 16, "layer_types": ["indexed_attention", "sliding_attention"]}
BYTES = {"head_dim": 8, "num_key_value_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "attention_hidden_size": 64}
MROPE = {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}}
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v"), MROPE),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), MLA),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), MLA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), HYBRID),
    **{name: {"text_config": HYBRID} for name in ("qwen3_5", "qwen3_5_moe")},
    "qwen4_exp": {"text_config": INDEXED},
    "qwen4_exp_text": INDEXED,
    **{name: {**HYBRID, **MLA} for name in ("bailing_hybrid", "kimi_linear")},
    "deepseek_v2": {**MLA, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots3_note": {
        "text_config": DOTS,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32, "per_layer_config": {}},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": DOTS,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "helium": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {"n_groups": 1, "num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "xlm": {"causal": True},
    "blt": {
        "use_cache": False,
        "encoder_hash_byte_group_vocab": 100,
        **dict.fromkeys(("patcher_config", "global_config"), BYTES),
        **{key: {**BYTES, "hidden_size_global": 32} for key in ("encoder_config", "decoder_config")},
    },
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(("zamba", "zamba2"), ZAMBA),
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
}
"""What some architectures need besides: sizes that must fit together."""

NEWEST = ("beam", "flint", "dots3_note", "dots3_note_text", "inkling2_text", "internlm3", "iquestcoder", "lfm3")
NEWEST += ("bailing_hybrid", "hy_v4", "kimi_linear", "kolibri1", "moss_transcribe_diarize")
NEWEST += ("cohere_compass_text", "qwen4_exp", "qwen4_exp_text")
"""What transformers 5.23 has and 5.15 had not."""

UNSET = ("head_dim", "num_key_value_heads")
"""Taken even where they are left to be computed."""

LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG |= {"original_max_position_embeddings": 32, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama, dynamic rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 4.0,
                "rope_theta": 1e4,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "phi3, longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "phi3, no window": ("phi3", {"sliding_window": None}),
    "phimoe, window": ("phimoe", {"sliding_window": WINDOW}),
    "phimoe, no jitter": ("phimoe", {"router_jitter_noise": 0.0}),
    "doge, no window": ("doge", {"sliding_window": None}),
    "minimax_m3, sparse": (
        "minimax_m3_vl_text",
        {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "index_n_heads": 2,
        },
    ),
    "qwen2, window": ("qwen2", {"use_sliding_window": True}),
    "gemma2, no soft caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
}
"""Settings of an architecture that change who attends to whom, or where: name -> architecture, settings."""


def architectures() -> list[str]:
    """All of transformers, then the variants."""
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


def tiny_config(name: str, more: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The configuration of an architecture or of a variant, with transformers' own defaults for what is no size."""
    architecture, own = VARIANTS.get(name, (name, {}))
    return _tiny(architecture, {**MORE.get(architecture, {}), **own, **(more or {})})


def _tiny(architecture: str, own: Mapping[str, Any]) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[architecture]
    default = kind()
    chosen = _sizes(default)
    for key in kind.sub_configs or {}:
        given = getattr(default, key, None)
        if isinstance(given, PreTrainedConfig):
            chosen[key] = {"model_type": given.model_type, **_sizes(given)}
        elif key in own:  # a part that is left out unless asked for
            chosen[key] = {}
    for key, value in own.items():
        chosen[key] = {**chosen[key], **value} if key in (kind.sub_configs or {}) else value
    return kind(**chosen)


def _sizes(default: PreTrainedConfig) -> dict[str, Any]:
    """Those that a configuration has, by whatever name; token ids that its vocabulary has."""
    names = set(default.to_dict()) | set(type(default).attribute_map)
    sized = [name for name in names if name in SIZES and (name in UNSET or _has(default, name))]
    chosen: dict[str, Any] = {name: SIZES[name] for name in sized}
    tokens = [name for name in names if name.endswith(("_token_id", "_token_index"))]
    chosen |= {name: SPECIAL.get(name, VOCABULARY - 1 - place) for place, name in enumerate(sorted(tokens))}
    if "is_decoder" in names:
        chosen["is_decoder"] = True
    return chosen


def _has(default: PreTrainedConfig, name: str) -> bool:
    try:
        return getattr(default, name, None) is not None
    except Exception:  # one that differs from layer to layer may not be asked for
        return False
