"""Content of config.json of published models, with every key that their authors wrote."""

from typing import Any

Config = dict[str, Any]

IDS = {"bos_token_id": 1, "eos_token_id": 2}
NOTES = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True}
SILU = {"hidden_act": "silu", "attention_dropout": 0.0}
BIASES = {"attention_bias": False, "mlp_bias": False}
NO_WINDOW = {"sliding_window": None, "use_sliding_window": False}
HYBRID_TYPES = (["linear_attention"] * 3 + ["full_attention"]) * 12


def make_config(
    family: str, architecture: str, sizes: tuple[int, int, int, int, int, int], positions: int, **keys: Any
) -> Config:
    """Return a config.json.

    Args:
        family: model_type.
        architecture: class of the model.
        sizes: layers, width, heads, heads of keys, width of the MLP, vocabulary.
        positions: positions that the model was trained with.
        keys: further keys.
    """
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    by_name = dict(zip((*names, "vocab_size"), sizes, strict=True))
    names_of_classes = {"model_type": family, "architectures": [architecture]}
    return by_name | names_of_classes | {"max_position_embeddings": positions} | NOTES | IDS | keys


DEEPSEEK: Config = {
    **SILU,
    **{"attention_bias": False, "aux_loss_alpha": 0.001, "kv_lora_rank": 512, "moe_layer_freq": 1, "seq_aux": True},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10_000},
    **{"pretraining_tp": 1, "tie_word_embeddings": False},
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    },
}
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
GEMMA2: Config = {
    **{"attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid", "pad_token_id": 0},
    **{"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6},
}
GEMMA3_IMAGES: Config = {
    **{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 255_999},
    **{"eoi_token_index": 256_000, "eos_token_id": [1, 106], "image_token_index": 262_144, "initializer_range": 0.02},
    **{"mm_tokens_per_image": 256, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0"},
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}
QWEN3: Config = {
    **SILU,
    **NO_WINDOW,
    **{"attention_bias": False, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1_000_000.0},
    **{"tie_word_embeddings": False},
}
QWEN3_MOE: Config = {
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "output_router_logits": False},
    **{"router_aux_loss_coef": 0.001},
}
LINEAR: Config = {
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16},
    **{"linear_num_value_heads": 32, "linear_value_head_dim": 128, "full_attention_interval": 4, "head_dim": 256},
}

# By the name of a preset that describes the same model.
PUBLISHED: dict[str, Config] = {
    "llama3.1_8b": make_config(
        "llama",
        "LlamaForCausalLM",
        (32, 4096, 32, 8, 14_336, 128_256),
        131_072,
        **SILU,
        **BIASES,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling={
            **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"},
            "original_max_position_embeddings": 8192,
        },
        rope_theta=500_000.0,
        tie_word_embeddings=False,
    ),
    "smollm2_135m": make_config(
        "llama",
        "LlamaForCausalLM",
        (30, 576, 9, 3, 1536, 49_152),
        8192,
        **SILU,
        attention_bias=False,
        is_llama_config=True,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100_000,
        tie_word_embeddings=True,
    ),
    "mistral_7b": make_config(
        "mistral",
        "MistralForCausalLM",
        (32, 4096, 32, 8, 14_336, 32_000),
        32_768,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        sliding_window=4096,
        tie_word_embeddings=False,
    ),
    "mistral_7b_v0.3": make_config(
        "mistral",
        "MistralForCausalLM",
        (32, 4096, 32, 8, 14_336, 32_768),
        32_768,
        **SILU,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "mixtral_8x7b": make_config(
        "mixtral",
        "MixtralForCausalLM",
        (32, 4096, 32, 8, 14_336, 32_000),
        32_768,
        **SILU,
        num_experts_per_tok=2,
        num_local_experts=8,
        output_router_logits=False,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        router_aux_loss_coef=0.02,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "qwen2.5_7b": make_config(
        "qwen2",
        "Qwen2ForCausalLM",
        (28, 3584, 28, 4, 18_944, 152_064),
        131_072,
        **SILU,
        max_window_layers=28,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        sliding_window=131_072,
        tie_word_embeddings=False,
        use_mrope=False,
        use_sliding_window=False,
    ),
    "qwen3_8b": make_config(
        "qwen3",
        "Qwen3ForCausalLM",
        (36, 4096, 32, 8, 12_288, 151_936),
        40_960,
        **QWEN3,
        max_window_layers=36,
    ),
    "qwen3_30b_a3b": make_config(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (48, 2048, 32, 4, 6144, 151_936),
        40_960,
        **QWEN3,
        **QWEN3_MOE,
        max_window_layers=48,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "gemma2_9b": make_config(
        "gemma2",
        "Gemma2ForCausalLM",
        (42, 3584, 16, 8, 14_336, 256_000),
        8192,
        **GEMMA2,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_act="gelu_pytorch_tanh",
        rope_theta=10_000.0,
        sliding_window=4096,
        sliding_window_size=4096,
    ),
    "gemma3_1b": make_config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (26, 1152, 4, 1, 6912, 262_144),
        32_768,
        **GEMMA2,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        rope_local_base_freq=10_000,
        rope_scaling=None,
        rope_theta=1_000_000,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "gemma3_4b": GEMMA3_IMAGES
    | {
        "text_config": {
            **{"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34},
            **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        }
    },
    "olmo2_7b": make_config(
        "olmo2",
        "Olmo2ForCausalLM",
        (32, 4096, 32, 32, 11_008, 100_352),
        4096,
        **SILU,
        attention_bias=False,
        pad_token_id=100_277,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=500_000,
        tie_word_embeddings=False,
    ),
    "olmoe_1b_7b": make_config(
        "olmoe",
        "OlmoeForCausalLM",
        (16, 2048, 16, 16, 1024, 50_304),
        4096,
        **SILU,
        attention_bias=False,
        clip_qkv=None,
        norm_topk_prob=False,
        num_experts=64,
        num_experts_per_tok=8,
        output_router_logits=False,
        pad_token_id=1,
        rope_scaling=None,
        rope_theta=10_000.0,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=False,
    ),
    "olmo3_7b": make_config(
        "olmo3",
        "Olmo3ForCausalLM",
        (32, 4096, 32, 32, 11_008, 100_278),
        65_536,
        **SILU,
        attention_bias=False,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        pad_token_id=100_277,
        rms_norm_eps=1e-6,
        rope_scaling={
            **{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0},
            **{"original_max_position_embeddings": 8192, "rope_type": "yarn"},
        },
        rope_theta=500_000,
        sliding_window=4096,
        tie_word_embeddings=False,
    ),
    "gpt_oss_20b": make_config(
        "gpt_oss",
        "GptOssForCausalLM",
        (24, 2880, 64, 8, 2880, 201_088),
        131_072,
        **SILU,
        attention_bias=True,
        experts_per_token=4,
        head_dim=64,
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 12,
        num_experts_per_tok=4,
        num_local_experts=32,
        output_router_logits=False,
        pad_token_id=199_999,
        quantization_config={"modules_to_not_convert": ["model.embed_tokens", "lm_head"], "quant_method": "mxfp4"},
        rms_norm_eps=1e-5,
        rope_scaling={
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"rope_type": "yarn", "truncate": False},
        },
        rope_theta=150_000,
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
    ),
    "deepseek_v2_lite": make_config(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        (27, 2048, 16, 16, 10_944, 102_400),
        163_840,
        **DEEPSEEK,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=False,
        num_experts_per_tok=6,
        q_lora_rank=None,
        rope_scaling=DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        topk_group=1,
        topk_method="greedy",
    ),
    "deepseek_v3": make_config(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (61, 7168, 128, 128, 18_432, 129_280),
        163_840,
        **DEEPSEEK,
        ep_size=1,
        first_k_dense_replace=3,
        moe_intermediate_size=2048,
        n_group=8,
        n_routed_experts=256,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        quantization_config={
            **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        },
        rope_scaling=DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_group=4,
        topk_method="noaux_tc",
    ),
    "smollm3_3b": make_config(
        "smollm3",
        "SmolLM3ForCausalLM",
        (36, 2048, 16, 4, 11_008, 128_256),
        65_536,
        **SILU,
        **BIASES,
        **NO_WINDOW,
        layer_types=["full_attention"] * 36,
        max_window_layers=28,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        pad_token_id=128_004,
        pretraining_tp=2,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=5_000_000.0,
    ),
    "qwen3_next_80b_a3b": make_config(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (48, 2048, 16, 2, 5120, 151_936),
        262_144,
        **SILU,
        **LINEAR,
        **QWEN3_MOE,
        moe_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        partial_rotary_factor=0.25,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=10_000_000,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
        use_sliding_window=False,
    ),
}
# Models without a preset.
OTHERS: dict[str, Config] = {
    "qwen3.5_35b_a3b": {
        **{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"},
        **{"image_token_id": 248_056, "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0"},
        **{"video_token_id": 248_057, "vision_config": {"depth": 27}, "vision_start_token_id": 248_053},
        "text_config": make_config(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            (40, 2048, 16, 2, 5120, 248_320),
            262_144,
            **SILU,
            **LINEAR,
            attention_bias=False,
            attn_output_gate=True,
            layer_types=HYBRID_TYPES[:40],
            mamba_ssm_dtype="float32",
            mlp_only_layers=[],
            moe_intermediate_size=512,
            mtp_num_hidden_layers=1,
            mtp_use_dedicated_embeddings=False,
            num_experts=256,
            num_experts_per_tok=8,
            partial_rotary_factor=0.25,
            rms_norm_eps=1e-6,
            rope_parameters={
                **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"},
                **{"rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
            },
            router_aux_loss_coef=0.001,
            shared_expert_intermediate_size=512,
        ),
    },
}
