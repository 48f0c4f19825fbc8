"""Published models by name: the values of `config.model` keys that describe each, as in its config.json.

A preset is a starting point. Keys beside `preset` in a spec replace its values, and sections are merged key by key. The
module does not interpret the keys; `config.DecoderConfig` does.
"""

import math
from typing import Any

from runner.storage import JsonObject

Keys = JsonObject


def _sizes(layers: int, width: int, heads: int, key_value_heads: int, mlp_width: int) -> Keys:
    sizes = {"layers": layers, "width": width, "heads": heads, "key_value_heads": key_value_heads}
    return sizes | {"mlp_width": mlp_width}


def _llama2(*sizes: int) -> Keys:
    return _sizes(*sizes) | {"vocabulary_size": 32_000}


def _llama3(*sizes: int, factor: float | None = None, **others: Any) -> Keys:
    rope: Keys = {"theta": 500_000.0}
    if factor is not None:
        rope["scaling"] = {"name": "llama3", "factor": factor, "original_positions": 8192}
    return _sizes(*sizes) | {"rope": rope, "vocabulary_size": 128_256} | others


def _qwen25(*sizes: int, **others: Any) -> Keys:
    common = {"rope": {"theta": 1_000_000.0}, "bias": {"query_key_value": True}, "norm_epsilon": 1e-6}
    return _sizes(*sizes) | common | {"vocabulary_size": 152_064} | others


def _qwen3(*sizes: int, **others: Any) -> Keys:
    common = {"rope": {"theta": 1_000_000.0}, "head_dim": 128, "query_key_norm": "head", "norm_epsilon": 1e-6}
    return _sizes(*sizes) | common | {"vocabulary_size": 151_936} | others


def _mistral(*sizes: int, **others: Any) -> Keys:
    return _sizes(*sizes) | others


def _gemma(*sizes: int, head_dim: int, query_scale_width: int, **others: Any) -> Keys:
    norms = {"norm": "both", "norm_epsilon": 1e-6, "norm_offset": True}
    embedding = {"tied_embedding": True, "embedding_scale": "sqrt_width"}
    heads = {"head_dim": head_dim, "query_scale": query_scale_width**-0.5}
    return _sizes(*sizes) | {"mlp": "geglu"} | norms | embedding | heads | others


def _gemma2(*sizes: int, head_dim: int, query_scale_width: int) -> Keys:
    windows: Keys = {"layer_pattern": ["window", "full"], "window": 4096}
    softcaps = {"attention_softcap": 50.0, "logit_softcap": 30.0}
    base = _gemma(*sizes, head_dim=head_dim, query_scale_width=query_scale_width)
    return base | windows | softcaps | {"vocabulary_size": 256_000}


def _gemma3(
    *sizes: int, head_dim: int = 256, query_scale_width: int = 256, factor: float | None = 8.0, **others: Any
) -> Keys:
    rope: Keys = {"theta": 1_000_000.0}
    if factor is not None:
        rope["scaling"] = {"name": "linear", "factor": factor}
    windows: Keys = {"layer_pattern": ["window"] * 5 + ["full"], "window": 1024, "window_rope": {"theta": 10_000.0}}
    base = _gemma(*sizes, head_dim=head_dim, query_scale_width=query_scale_width)
    return base | windows | {"rope": rope, "query_key_norm": "head", "vocabulary_size": 262_208} | others


def _gemma4(
    *sizes: int,
    windows: int = 5,
    window: int = 512,
    keys: int | None = None,
    sharing: Keys | None = None,
    **others: Any,
) -> Keys:
    """Return the keys of a Gemma 4 model, of whose layers `windows` come before each full one.

    `keys` are the heads of full layers whose keys are also values; with `sharing` layers have embeddings of their own.
    """
    full: Keys = {"head_dim": 512}
    if keys is not None:
        full |= {"key_value_heads": keys, "keys_as_values": True}
    heads = {"head_dim": 256, "full_heads": full, "query_scale": 1.0, "query_key_norm": "head", "value_norm": True}
    ropes = {"rope": {"theta": 1_000_000.0, "fraction": 0.25, "proportional": True}, "window_rope": {"theta": 10_000.0}}
    pattern = {"layer_pattern": ["window"] * windows + ["full"], "window": window}
    norms = {"norm": "both", "norm_epsilon": 1e-6, "layer_scale": True, "logit_softcap": 30.0}
    embedding: Keys = {"tied_embedding": True, "embedding_scale": "sqrt_width", "vocabulary_size": 262_144}
    if sharing is not None:
        embedding |= {"layer_embedding_width": 256, "key_value_sharing": sharing}
    return _sizes(*sizes) | {"mlp": "geglu"} | heads | ropes | pattern | norms | embedding | others


def _olmo2(*sizes: int) -> Keys:
    norms = {"norm": "post", "norm_epsilon": 1e-6, "query_key_norm": "whole"}
    return _sizes(*sizes) | norms | {"rope": {"theta": 500_000.0}, "vocabulary_size": 100_352}


def _olmo3(*sizes: int) -> Keys:
    scaling = {"name": "yarn", "factor": 8.0, "original_positions": 8192}
    windows: Keys = {"layer_pattern": ["window"] * 3 + ["full"], "window": 4096, "window_rope": {"theta": 500_000.0}}
    rope = {"rope": {"theta": 500_000.0, "scaling": scaling}}
    return _olmo2(*sizes) | windows | rope | {"vocabulary_size": 100_278}


def _deepseek(*sizes: int, query_rank: int | None, vocabulary_size: int, mscale: float, **moe: Any) -> Keys:
    """Return the keys of a DeepSeek model; `sizes` are layers, width, heads and mlp_width.

    `mscale` is DeepSeek's factor of YaRN: scores grow by the square of 0.1 mscale ln(scaling factor) + 1. Here that
    growth is part of `query_scale`, so `attention_factor`, which would apply it in the rotation, is 1.
    """
    layers, width, heads, mlp_width = sizes
    latent = {"query_rank": query_rank, "key_value_rank": 512}
    latent |= {"plain_head_dim": 128, "rotary_head_dim": 64, "value_head_dim": 128}
    growth = 0.1 * mscale * math.log(40.0) + 1
    scaling = {"name": "yarn", "factor": 40.0, "original_positions": 4096, "attention_factor": 1.0}
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "mlp_width": mlp_width,
        "latent": latent,
        "moe": moe,
        "norm_epsilon": 1e-6,
        "rope": {"scaling": scaling, "pairs": "neighbours"},
        "query_scale": growth**2 / math.sqrt(192),
        "vocabulary_size": vocabulary_size,
    }


def _deepseek2(*sizes: int, query_rank: int | None, mscale: float, **moe: Any) -> Keys:
    gates = {"experts_per_token": 6, "shared_experts": 2, "dense_layers": 1, "normalise_gates": False}
    return _deepseek(*sizes, query_rank=query_rank, vocabulary_size=102_400, mscale=mscale, **gates, **moe)


def _deepseek3(*sizes: int) -> Keys:
    experts = {"experts": 256, "experts_per_token": 8, "expert_width": 2048, "shared_experts": 1, "dense_layers": 3}
    gates = {"gate": "sigmoid", "routed_scale": 2.5, "groups": 8, "groups_per_token": 4}
    balance = {"bias_rate": 0.001, "auxiliary_loss": 0.0001}
    return _deepseek(*sizes, query_rank=1536, vocabulary_size=129_280, mscale=1.0, **experts, **gates, **balance)


def _gpt_oss(layers: int, experts: int) -> Keys:
    scaling = {"name": "yarn", "factor": 32.0, "original_positions": 4096, "truncate": False}
    attention: Keys = {"head_dim": 64, "attention_sinks": True, "layer_pattern": ["window", "full"], "window": 128}
    mlp: Keys = {"mlp": "clamped_swiglu", "moe": {"experts": experts, "experts_per_token": 4, "bias": True}}
    others: Keys = {"bias": {"query_key_value": True, "attention_out": True}, "vocabulary_size": 201_088}
    return (
        _sizes(layers, 2880, 64, 8, 2880)
        | attention
        | mlp
        | others
        | {"rope": {"theta": 150_000.0, "scaling": scaling}}
    )


def _smollm2(*sizes: int, theta: float = 100_000.0) -> Keys:
    return _sizes(*sizes) | {"rope": {"theta": theta}, "tied_embedding": True, "vocabulary_size": 49_152}


PRESETS: dict[str, Keys] = {
    "llama2_7b": _llama2(32, 4096, 32, 32, 11_008),
    "llama2_13b": _llama2(40, 5120, 40, 40, 13_824),
    "llama2_70b": _llama2(80, 8192, 64, 8, 28_672),
    "llama3_8b": _llama3(32, 4096, 32, 8, 14_336),
    "llama3_70b": _llama3(80, 8192, 64, 8, 28_672),
    "llama3.1_8b": _llama3(32, 4096, 32, 8, 14_336, factor=8.0),
    "llama3.1_70b": _llama3(80, 8192, 64, 8, 28_672, factor=8.0),
    "llama3.1_405b": _llama3(126, 16_384, 128, 8, 53_248, factor=8.0),
    "llama3.2_1b": _llama3(16, 2048, 32, 8, 8192, factor=32.0, tied_embedding=True),
    "llama3.2_3b": _llama3(28, 3072, 24, 8, 8192, factor=32.0, tied_embedding=True),
    "qwen2.5_0.5b": _qwen25(24, 896, 14, 2, 4864, vocabulary_size=151_936, tied_embedding=True),
    "qwen2.5_1.5b": _qwen25(28, 1536, 12, 2, 8960, vocabulary_size=151_936, tied_embedding=True),
    "qwen2.5_3b": _qwen25(36, 2048, 16, 2, 11_008, vocabulary_size=151_936, tied_embedding=True),
    "qwen2.5_7b": _qwen25(28, 3584, 28, 4, 18_944),
    "qwen2.5_14b": _qwen25(48, 5120, 40, 8, 13_824, norm_epsilon=1e-5),
    "qwen2.5_32b": _qwen25(64, 5120, 40, 8, 27_648, norm_epsilon=1e-5),
    "qwen2.5_72b": _qwen25(80, 8192, 64, 8, 29_568, norm_epsilon=1e-5),
    "qwen3_0.6b": _qwen3(28, 1024, 16, 8, 3072, tied_embedding=True),
    "qwen3_1.7b": _qwen3(28, 2048, 16, 8, 6144, tied_embedding=True),
    "qwen3_4b": _qwen3(36, 2560, 32, 8, 9728, tied_embedding=True),
    "qwen3_8b": _qwen3(36, 4096, 32, 8, 12_288),
    "qwen3_14b": _qwen3(40, 5120, 40, 8, 17_408),
    "qwen3_32b": _qwen3(64, 5120, 64, 8, 25_600),
    "mistral_7b": _mistral(32, 4096, 32, 8, 14_336, window=4096, layer_pattern=["window"], vocabulary_size=32_000),
    "mistral_7b_v0.3": _mistral(32, 4096, 32, 8, 14_336, rope={"theta": 1_000_000.0}, vocabulary_size=32_768),
    "mistral_nemo_12b": _mistral(
        *(40, 5120, 32, 8, 14_336), head_dim=128, rope={"theta": 1_000_000.0}, vocabulary_size=131_072
    ),
    "mixtral_8x7b": _mistral(
        *(32, 4096, 32, 8, 14_336),
        rope={"theta": 1_000_000.0},
        moe={"experts": 8, "experts_per_token": 2},
        vocabulary_size=32_000,
    ),
    "qwen3_30b_a3b": _qwen3(48, 2048, 32, 4, 768, moe={"experts": 128, "experts_per_token": 8}),
    "qwen3_next_80b_a3b": _sizes(48, 2048, 16, 2, 512)
    | {
        "layer_pattern": ["linear"] * 3 + ["full"],
        "linear": {"key_heads": 16, "value_heads": 32, "key_head_dim": 128, "value_head_dim": 128},
        "attention_gate": True,
        "norm_epsilon": 1e-6,
        "norm_offset": True,
        "query_key_norm": "head",
        "head_dim": 256,
        "rope": {"theta": 10_000_000.0, "fraction": 0.25},
        "moe": {"experts": 512, "experts_per_token": 10, "shared_experts": 1, "shared_gate": True},
        "vocabulary_size": 151_936,
    },
    "olmoe_1b_7b": _sizes(16, 2048, 16, 16, 1024)
    | {
        "query_key_norm": "whole",
        "moe": {"experts": 64, "experts_per_token": 8, "normalise_gates": False},
        "vocabulary_size": 50_304,
    },
    "deepseek_v2_lite": _deepseek2(
        *(27, 2048, 16, 10_944), query_rank=None, mscale=0.707, experts=64, expert_width=1408
    ),
    "deepseek_v2": _deepseek2(
        *(60, 5120, 128, 12_288),
        query_rank=1536,
        mscale=0.707,
        experts=160,
        expert_width=1536,
        routed_scale=16.0,
        groups=8,
        groups_per_token=3,
        group_score="max",
    ),
    "deepseek_v3": _deepseek3(61, 7168, 128, 18_432),
    "gemma2_2b": _gemma2(26, 2304, 8, 4, 9216, head_dim=256, query_scale_width=256),
    "gemma2_9b": _gemma2(42, 3584, 16, 8, 14_336, head_dim=256, query_scale_width=256),
    "gemma2_27b": _gemma2(46, 4608, 32, 16, 36_864, head_dim=128, query_scale_width=144),
    "gemma3_1b": _gemma3(26, 1152, 4, 1, 6912, window=512, factor=None, vocabulary_size=262_144),
    "gemma3_4b": _gemma3(34, 2560, 8, 4, 10_240),
    "gemma3_12b": _gemma3(48, 3840, 16, 8, 15_360),
    "gemma3_27b": _gemma3(62, 5376, 32, 16, 21_504, head_dim=128, query_scale_width=168),
    "gemma4_e2b": _gemma4(35, 1536, 8, 1, 6144, windows=4, sharing={"layers": 20, "mlp_width": 12_288}),
    "gemma4_e4b": _gemma4(42, 2560, 8, 2, 10_240, sharing={"layers": 18}),
    "gemma4_31b": _gemma4(60, 5376, 32, 16, 21_504, window=1024, keys=4),
    "gemma4_26b_a4b": _gemma4(
        *(30, 2816, 16, 8, 2112),
        window=1024,
        keys=2,
        moe={
            **{"experts": 128, "experts_per_token": 8, "expert_width": 704},
            **{"beside_mlp": True, "scaled_router": True},
        },
    ),
    "olmo2_1b": _olmo2(16, 2048, 16, 16, 8192),
    "olmo2_7b": _olmo2(32, 4096, 32, 32, 11_008),
    "olmo2_13b": _olmo2(40, 5120, 40, 40, 13_824),
    "olmo2_32b": _olmo2(64, 5120, 40, 8, 27_648),
    "olmo3_7b": _olmo3(32, 4096, 32, 32, 11_008),
    "olmo3_32b": _olmo3(64, 5120, 40, 8, 27_648),
    "gpt_oss_20b": _gpt_oss(24, experts=32),
    "gpt_oss_120b": _gpt_oss(36, experts=128),
    "smollm2_135m": _smollm2(30, 576, 9, 3, 1536),
    "smollm2_360m": _smollm2(32, 960, 15, 5, 2560),
    "smollm2_1.7b": _smollm2(24, 2048, 32, 32, 8192, theta=130_000.0),
    "smollm3_3b": _sizes(36, 2048, 16, 4, 11_008)
    | {
        "layer_pattern": ["full"] * 3 + ["no_rope"],
        "rope": {"theta": 5_000_000.0},
        "norm_epsilon": 1e-6,
        "tied_embedding": True,
        "vocabulary_size": 128_256,
    },
}
