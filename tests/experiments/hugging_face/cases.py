"""Small models of each family, as arguments of the config classes of transformers.

The cases cover the options of each family. The first case of a family has a fixture in `fixtures/`, which `write.py`
makes with the real library.
"""

from typing import Any

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
UNGROUPED = {"num_attention_heads": 2, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE = SIZES | GROUPED | TOKENS | {"max_position_embeddings": 64, "initializer_range": 0.3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
THETA = {"rope_theta": 100.0}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1}
LATENT = ROUTED | {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_shared_experts": 2,
}
MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
DENSE_FIRST = EXPERTS | {"moe_intermediate_size": 12, "mlp_only_layers": [0], "num_hidden_layers": 3}

LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "partial_rotary_factor": 0.5,
}
SHARED_EXPERT = EXPERTS | {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}

GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 5,
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}

GEMMA4_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_scaling": LLAMA3 | ORIGINAL, **THETA}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"rope_scaling": YARN | ORIGINAL, "tie_word_embeddings": True, **THETA}),
    "qwen3": ("qwen3", {}),
    "olmo2": ("olmo2", {"num_key_value_heads": 4}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 5, "num_hidden_layers": 5, "rope_scaling": YARN | ORIGINAL, "rope_theta": 500_000.0},
    ),
    "gemma2": ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 12, "num_hidden_layers": 3}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 5, "sliding_window_pattern": 2, "num_hidden_layers": 5, "rope_scaling": LINEAR},
    ),
    "gemma4": ("gemma4_text", GEMMA4 | PER_LAYER | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", DENSE_FIRST | {"norm_topk_prob": True}),
    "gpt_oss": (
        "gpt_oss",
        LOCAL
        | {"sliding_window": 5, "num_hidden_layers": 3, "swiglu_limit": 7.0}
        | {"rope_scaling": YARN | ORIGINAL | {"truncate": False}, **THETA},
    ),
    "olmoe": ("olmoe", EXPERTS | {"head_dim": 4, "num_key_value_heads": 4}),
    "deepseek_v2": ("deepseek_v2", LATENT | {"q_lora_rank": None, "rope_scaling": YARN | ORIGINAL | MSCALE}),
    "deepseek_v3": ("deepseek_v3", LATENT | {"q_lora_rank": 8, "n_group": 2, "topk_group": 1, "num_hidden_layers": 3}),
    "qwen3_next": ("qwen3_next", LINEAR_ATTENTION | SHARED_EXPERT | {"num_hidden_layers": 4}),
    "qwen3_5": ("qwen3_5_text", LINEAR_ATTENTION | {"full_attention_interval": 2}),
    "qwen3_5_moe": ("qwen3_5_moe_text", LINEAR_ATTENTION | SHARED_EXPERT | {"full_attention_interval": 2}),
    # These are compared only with the live library.
    "llama-ungrouped": ("llama", UNGROUPED),
    "llama-linear": ("llama", {"rope_scaling": LINEAR, **THETA}),
    "llama-yarn": ("llama", {"rope_scaling": YARN | ORIGINAL | {"beta_fast": 4.0, "beta_slow": 0.5}, **THETA}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-without-window": ("mistral", {"sliding_window": None}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3-ungrouped": ("qwen3", UNGROUPED | {"tie_word_embeddings": True}),
    "olmo2-grouped": ("olmo2", {"attention_bias": True}),
    "olmo3-thetas": (
        "olmo3",
        {
            "sliding_window": 5,
            "num_hidden_layers": 5,
            "rope_parameters": {
                "full_attention": YARN | ORIGINAL | THETA,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "olmo3-full": ("olmo3", {"layer_types": ["full_attention"] * 2, "attention_bias": True}),
    "gpt_oss-ungrouped": (
        "gpt_oss",
        UNGROUPED | LOCAL | {"num_experts_per_tok": 3, "sliding_window": 3, "rope_scaling": YARN | ORIGINAL},
    ),
    "gpt_oss-unscaled": ("gpt_oss", LOCAL | {"rope_parameters": {"rope_type": "default", **THETA}}),
    "gpt_oss-full": ("gpt_oss", LOCAL | {"layer_types": ["full_attention"] * 2}),
    "gemma2-without-softcaps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-tight-softcaps": ("gemma2", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0}),
    "mixtral-window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 5}),
    "qwen3_moe-all-sparse": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 12}),
    "olmoe-normalised": ("olmoe", EXPERTS | {"head_dim": 4, "norm_topk_prob": True}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": 8, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
        | {"routed_scaling_factor": 4.0, "attention_bias": True},
    ),
    "deepseek_v2-all-sparse": ("deepseek_v2", LATENT | {"q_lora_rank": 8, "first_k_dense_replace": 0, "n_group": 1}),
    "deepseek_v3-scaled": (
        "deepseek_v3",
        LATENT
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_scaling": YARN | ORIGINAL | MSCALE | {"mscale": 0.3},
        }
        | {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-4},
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        LATENT | {"q_lora_rank": 8, "n_group": 2, "topk_group": 2, "rope_interleave": False},
    ),
    "deepseek_v2-dense": ("deepseek_v2", LATENT | {"q_lora_rank": 8, "first_k_dense_replace": 2}),
    "qwen3_next-dense-first": (
        "qwen3_next",
        LINEAR_ATTENTION
        | SHARED_EXPERT
        | {"mlp_only_layers": [0], "num_hidden_layers": 5, "norm_topk_prob": False, "attention_bias": True},
    ),
    "qwen3_next-ungrouped": (
        "qwen3_next",
        LINEAR_ATTENTION
        | UNGROUPED
        | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "num_experts": 0, "full_attention_interval": 2}
        | {"partial_rotary_factor": 1.0, "rope_scaling": YARN | ORIGINAL, **THETA},
    ),
    "qwen3_5-tied": (
        "qwen3_5_text",
        LINEAR_ATTENTION | {"layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True},
    ),
    # Like 31B, 26B-A4B and E4B.
    "gemma4-keys_as_values": ("gemma4_text", GEMMA4 | KEYS_AS_VALUES),
    "gemma4-experts": ("gemma4_text", GEMMA4 | KEYS_AS_VALUES | GEMMA4_EXPERTS),
    "gemma4-shared": (
        "gemma4_text",
        GEMMA4 | PER_LAYER | {"num_kv_shared_layers": 3, "num_hidden_layers": 7, "layer_types": GEMMA4_TYPES},
    ),
    "gemma4-full": (
        "gemma4_text",
        GEMMA4 | {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "attention_bias": True},
    ),
    "gemma3-softcap": ("gemma3_text", {"final_logit_softcapping": 2.0, "num_hidden_layers": 7, "sliding_window": 3}),
}
DAILY = [name for name in CASES if "-" not in name]


def arguments(name: str) -> tuple[str, dict[str, Any]]:
    """Return the model_type of a case and the arguments of its config class."""
    model_type, changes = CASES[name]
    return model_type, BASE | changes
