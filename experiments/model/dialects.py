"""The config.json of a decoder in the words of each family of transformers: written, and read back.

Read is what any version has written, with what a family takes for a key that a file leaves out. Knows no tensor.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from experiments.model.config import DecoderConfig, LayerKind
from experiments.model.rotary import LinearScaling, Llama3Scaling, Rope
from runner.errors import InvalidError
from runner.spec.document import suggest_choices
from runner.storage import JsonObject

Json = JsonObject


def decoder_of(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes. Raises `InvalidError`, one line, if it describes none that is known."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise InvalidError(f"model_type: got {str(name)[:60]!r}{suggest_choices(str(name), list(FAMILIES))}")
    return _read(FAMILIES[name], config)


# Rotary positions. Written as every version of transformers reads them; read also as version 5 writes them.


def _rope_written(rope: Rope) -> Json:
    return {"rope_theta": rope.theta, "rope_scaling": _scaling_written(rope)}


def _scaling_written(rope: Rope) -> Json | None:
    scaling = rope.scaling
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    written = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_positions}
    if isinstance(scaling, Llama3Scaling):
        factors = {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
        return {"rope_type": "llama3", **written, **factors}
    written |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.attention_factor != "auto":
        written["attention_factor"] = scaling.attention_factor
    return {"rope_type": "yarn", **written}


def _rope_read(found: Mapping[str, Any], theta: float, kind: str | None = None) -> Json:
    """Keys of a `Rope`; `theta` is the family's default, `kind` that of the layers, where the file tells them apart."""
    given = found.get("rope_parameters") or {}
    given = given.get(kind, {}) if kind is not None and kind in given else given
    scaling = found.get("rope_scaling") or given
    return {"theta": given.get("rope_theta", found.get("rope_theta", theta)), "scaling": _scaling_read(scaling, found)}


def _scaling_read(given: Mapping[str, Any], found: Mapping[str, Any]) -> Json | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return {"name": "linear", "factor": given["factor"]}
    original = given.get("original_max_position_embeddings", found.get("max_position_embeddings"))
    if kind == "llama3":
        factors = {"low_frequency_factor": given["low_freq_factor"], "high_frequency_factor": given["high_freq_factor"]}
        return {"name": "llama3", "factor": given["factor"], "original_positions": original, **factors}
    if kind != "yarn" or not given.get("truncate", True):
        raise InvalidError(f"rope: {kind} scaling, and this decoder has linear, llama3 and yarn (truncated)")
    betas = {"beta_fast": given.get("beta_fast") or 32.0, "beta_slow": given.get("beta_slow") or 1.0}
    return {
        "name": "yarn",
        "factor": given["factor"],
        "original_positions": original,
        "attention_factor": _attention_factor(given),
        **betas,
    }


def _attention_factor(given: Mapping[str, Any]) -> float | str:
    """What YaRN multiplies queries and keys by; DeepSeek's models give it as two."""
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if not (above and below):
        return "auto"
    over, under = (0.1 * scale * math.log(max(given["factor"], 1)) + 1 for scale in (above, below))
    return float(over / under)


# Families.


class Dialect(NamedTuple):
    """How a family writes config.json."""

    model_type: str
    architecture: str
    write: Callable[[DecoderConfig], Json]  # what is not common to all
    read: Callable[[Mapping[str, Any]], Json]  # keys of a DecoderConfig that are not common to all
    epsilon: float = 1e-6  # what stands for a key that a config.json leaves out
    is_tied: bool = False


def _read(family: Dialect, found: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes. Raises `InvalidError`, one line, if it describes none."""
    heads = found.get("num_attention_heads")
    try:
        common = {
            "layers": found["num_hidden_layers"],
            "width": found["hidden_size"],
            "heads": heads,
            "key_value_heads": found.get("num_key_value_heads") or heads,
            "head_dim": found.get("head_dim") or "auto",
            "mlp_width": found["intermediate_size"],
            "norm_epsilon": found.get("rms_norm_eps", family.epsilon),
            "tied_embedding": found.get("tie_word_embeddings", family.is_tied),
        }
        return DecoderConfig(**common | family.read(found))
    except KeyError as error:
        raise InvalidError(f"{error.args[0]}: is missing") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "model"
        raise InvalidError(f"{key}: {first['msg']}") from None


def _activation(found: Mapping[str, Any], key: str, default: str) -> str:
    name = found.get(key, default) or default
    known = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
    if name not in known:
        raise InvalidError(f"mlp: activation {name}, and this decoder has {' and '.join(known)}")
    return known[name]


def _silu(config: DecoderConfig) -> Json:
    return {"hidden_act": "gelu_pytorch_tanh" if config.mlp == "geglu" else "silu"}


def _windows_written(config: DecoderConfig) -> Json:
    """Windows of families whose layers are told apart by a list."""
    types = ["sliding_attention" if kind == "window" else "full_attention" for kind in config.kinds]
    return {"sliding_window": config.window, "layer_types": types}


def _windows_read(found: Mapping[str, Any], default: Callable[[int], LayerKind]) -> Json:
    """`default` tells the kind of a layer where the file has no list."""
    layers, types = found["num_hidden_layers"], found.get("layer_types")
    if types is None:
        kinds = [default(layer) for layer in range(layers)]
    else:
        kinds = ["window" if kind == "sliding_attention" else "full" for kind in types]
    return {"layer_pattern": _turn_of(kinds), "window": found.get("sliding_window") if "window" in kinds else None}


def _turn_of(kinds: list[LayerKind]) -> list[LayerKind]:
    """The shortest pattern that makes these layers."""
    lengths = range(1, len(kinds) + 1)
    return next(kinds[:n] for n in lengths if all(kind == kinds[layer % n] for layer, kind in enumerate(kinds)))


def _write_llama(config: DecoderConfig) -> Json:
    biases = {"attention_bias": config.bias.query_key_value, "mlp_bias": config.bias.mlp}
    return _silu(config) | _rope_written(config.rope) | biases


def _read_llama(found: Mapping[str, Any]) -> Json:
    attention, mlp = found.get("attention_bias", False), found.get("mlp_bias", False)
    return {
        "mlp": _activation(found, "hidden_act", "silu"),
        "rope": _rope_read(found, 10_000.0),
        "bias": {"query_key_value": attention, "attention_out": attention, "mlp": mlp},
    }


def _write_mistral(config: DecoderConfig) -> Json:
    rope = config.window_rope or config.rope
    return _silu(config) | _rope_written(rope) | {"sliding_window": config.window}


def _read_mistral(found: Mapping[str, Any]) -> Json:
    window = found.get("sliding_window", 4096)
    kinds = {"layer_pattern": ["full" if window is None else "window"], "window": window}
    return {"mlp": _activation(found, "hidden_act", "silu"), "rope": _rope_read(found, 10_000.0), **kinds}


def _write_qwen(config: DecoderConfig) -> Json:
    windows = _windows_written(config) | {"use_sliding_window": config.window is not None}
    return _silu(config) | _rope_written(config.rope) | windows | {"max_window_layers": config.layers}


def _read_qwen(found: Mapping[str, Any]) -> Json:
    uses, first = found.get("use_sliding_window", False), found.get("max_window_layers", 28)
    windows = _windows_read(found, lambda layer: "window" if uses and layer >= first else "full")
    return {"mlp": _activation(found, "hidden_act", "silu"), "rope": _rope_read(found, 10_000.0), **windows}


def _read_qwen2(found: Mapping[str, Any]) -> Json:
    return _read_qwen(found) | {"bias": {"query_key_value": True}}


def _write_qwen3(config: DecoderConfig) -> Json:
    return _write_qwen(config) | {"attention_bias": config.bias.query_key_value}


def _read_qwen3(found: Mapping[str, Any]) -> Json:
    bias = found.get("attention_bias", False)
    biases = {"bias": {"query_key_value": bias, "attention_out": bias}}
    return _read_qwen(found) | biases | {"query_key_norm": "head"}


def _write_olmo2(config: DecoderConfig) -> Json:
    return _silu(config) | _rope_written(config.rope) | {"attention_bias": config.bias.query_key_value}


def _read_olmo2(found: Mapping[str, Any]) -> Json:
    return _read_llama({**found, "mlp_bias": False}) | {"norm": "post", "query_key_norm": "whole"}


def _write_smollm3(config: DecoderConfig) -> Json:
    rotated = [int(kind != "no_rope") for kind in config.kinds]
    windows = {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * config.layers}
    return _write_llama(config) | windows | {"no_rope_layers": rotated}


def _read_smollm3(found: Mapping[str, Any]) -> Json:
    interval = found.get("no_rope_layer_interval", 4)
    rotated = found.get("no_rope_layers") or [(layer + 1) % interval for layer in range(found["num_hidden_layers"])]
    if found.get("use_sliding_window", False):
        raise InvalidError("window: layers with windows and without positions, and this decoder has none")
    kinds: list[LayerKind] = ["full" if is_rotated else "no_rope" for is_rotated in rotated]
    return _read_llama({"rope_theta": 2_000_000.0, **found}) | {"layer_pattern": _turn_of(kinds)}


def _write_gemma2(config: DecoderConfig) -> Json:
    scale = config.head_size**-0.5 if config.query_scale == "auto" else config.query_scale
    return (
        {"hidden_activation": "silu" if config.mlp == "swiglu" else "gelu_pytorch_tanh"}
        | _rope_written(config.rope)
        | _windows_written(config)
        | {"query_pre_attn_scalar": round(scale**-2), "attention_bias": config.bias.query_key_value}
        | {"final_logit_softcapping": config.logit_softcap, "attn_logit_softcapping": config.attention_softcap}
    )


def _read_gemma(found: Mapping[str, Any], pattern: int, softcap: float | None) -> Json:
    bias = found.get("attention_bias", False)
    return {
        "mlp": _activation(found, "hidden_activation", "gelu_pytorch_tanh"),
        "head_dim": found.get("head_dim", 256),
        "norm": "both",
        "norm_offset": True,
        "embedding_scale": "sqrt_width",
        "query_scale": found.get("query_pre_attn_scalar", 256) ** -0.5,
        "logit_softcap": found.get("final_logit_softcapping", softcap),
        "bias": {"query_key_value": bias, "attention_out": bias},
        **_windows_read(found, lambda layer: "window" if (layer + 1) % pattern else "full"),
    }


def _read_gemma2(found: Mapping[str, Any]) -> Json:
    softcap = {"attention_softcap": found.get("attn_logit_softcapping", 50.0)}
    return _read_gemma(found, 2, 30.0) | softcap | {"rope": _rope_read(found, 10_000.0)}


def _write_gemma3(config: DecoderConfig) -> Json:
    local = (config.window_rope or config.rope).theta
    return _write_gemma2(config) | {"rope_local_base_freq": local, "attn_logit_softcapping": None}


def _read_gemma3(found: Mapping[str, Any]) -> Json:
    keys = _read_gemma(found, found.get("sliding_window_pattern", 6), None) | {"query_key_norm": "head"}
    keys["rope"] = _rope_read(found, 1_000_000.0, "full_attention")
    if "window" in keys["layer_pattern"]:
        given = (found.get("rope_parameters") or {}).get("sliding_attention", {})
        theta = given.get("rope_theta", found.get("rope_local_base_freq", 10_000.0))
        keys["window_rope"] = {"theta": theta, "scaling": _scaling_read(given, found)}
    return keys


def _write_mixtral(config: DecoderConfig) -> Json:
    names = {"num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"}
    return _write_mistral(config) | _experts_written(config, names)


def _read_mixtral(found: Mapping[str, Any]) -> Json:
    keys = _read_mistral({"sliding_window": None, "rope_theta": 1_000_000.0, **found})
    return keys | _experts_read(found, _num_experts(found, 8), found.get("num_experts_per_tok", 2), True)


def _write_qwen3_moe(config: DecoderConfig) -> Json:
    dense = 0 if config.moe is None else config.moe.dense_layers
    widths = {"moe_intermediate_size": config.expert_width, "mlp_only_layers": list(range(dense))}
    return _write_qwen3(config) | _experts_written(config, _EXPERT_KEYS) | widths | {"decoder_sparse_step": 1}


def _read_qwen3_moe(found: Mapping[str, Any]) -> Json:
    dense = found.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))) or found.get("decoder_sparse_step", 1) != 1:
        raise InvalidError("moe.dense_layers: layers without experts after some with, and this decoder has them first")
    width, number = found.get("moe_intermediate_size", 768), found.get("num_experts_per_tok", 8)
    keys = _experts_read(found, _num_experts(found, 128), number, found.get("norm_topk_prob", False))
    if not dense:
        return _read_qwen3(found) | keys | {"mlp_width": width}
    return _read_qwen3(found) | {"moe": keys["moe"] | {"dense_layers": len(dense), "expert_width": width}}


def _write_olmoe(config: DecoderConfig) -> Json:
    return _write_llama(config) | _experts_written(config, _EXPERT_KEYS) | {"clip_qkv": None}


def _read_olmoe(found: Mapping[str, Any]) -> Json:
    if found.get("clip_qkv") is not None:
        raise InvalidError("clip_qkv: queries, keys and values that are clipped, and this decoder has none")
    number = found.get("num_experts_per_tok", 8)
    keys = _experts_read(found, _num_experts(found, 64), number, found.get("norm_topk_prob", False))
    return _read_llama({**found, "mlp_bias": False}) | keys | {"query_key_norm": "whole"}


# DeepSeek's.


def _write_deepseek_v2(config: DecoderConfig) -> Json:
    is_limited = config.moe is not None and config.moe.groups_per_token < config.moe.groups
    method = {"topk_method": "group_limited_greedy" if is_limited else "greedy"}
    return _deepseek_written(config) | method | {"mlp_bias": config.bias.mlp}


def _read_deepseek_v2(found: Mapping[str, Any]) -> Json:
    if found.get("norm_topk_prob") or found.get("mlp_bias"):
        raise InvalidError("moe.normalise_gates, bias.mlp: transformers has neither in this family")
    method, groups = found.get("topk_method", "greedy"), {"groups": 1, "groups_per_token": 1}
    if method == "group_limited_greedy":
        groups = {"groups": found["n_group"], "groups_per_token": found["topk_group"]}
    elif method != "greedy":
        raise InvalidError(f"moe: topk_method {method}, and this decoder has greedy and group_limited_greedy")
    chosen = {"gate": "softmax", "normalise_gates": False, "group_score": "max", **groups}
    return _deepseek_read(found, {"first": 0, "scale": 1.0}, chosen)


def _write_deepseek_v3(config: DecoderConfig) -> Json:
    interleaved = {"rope_interleave": config.rope.pairs == "neighbours", "num_nextn_predict_layers": 0}
    return _deepseek_written(config) | interleaved


def _read_deepseek_v3(found: Mapping[str, Any]) -> Json:
    chosen = {
        "gate": "sigmoid",
        "normalise_gates": found.get("norm_topk_prob", True),
        "groups": found.get("n_group", 8),
        "groups_per_token": found.get("topk_group", 4),
        "bias_rate": 0.001,
    }
    keys = _deepseek_read(found, {"first": 3, "scale": 2.5}, chosen)
    if not found.get("rope_interleave", True):
        keys["rope"]["pairs"] = "halves"
    return keys


_LATENT_KEYS = {
    "q_lora_rank": "query_rank",
    "kv_lora_rank": "key_value_rank",
    "qk_nope_head_dim": "plain_head_dim",
    "qk_rope_head_dim": "rotary_head_dim",
    "v_head_dim": "value_head_dim",
}
_DEEPSEEK_EXPERT_KEYS = {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "shared_experts",
    "first_k_dense_replace": "dense_layers",
    "norm_topk_prob": "normalise_gates",
    "routed_scaling_factor": "routed_scale",
    "n_group": "groups",
    "topk_group": "groups_per_token",
    "aux_loss_alpha": "auxiliary_loss",
}


def _deepseek_written(config: DecoderConfig) -> Json:
    latent, moe = config.latent, config.moe
    written: Json = _silu(config) | _rope_written(config.rope) | {"attention_bias": config.bias.query_key_value}
    if latent is not None:
        written |= {name: getattr(latent, key) for name, key in _LATENT_KEYS.items()}
        written |= {"head_dim": latent.rotary_head_dim}
    if written["rope_scaling"] is not None:
        written["rope_scaling"] |= _mscale_written(config)
    if moe is None:
        return written | {"first_k_dense_replace": config.layers}
    experts = {name: getattr(moe, key) for name, key in _DEEPSEEK_EXPERT_KEYS.items()}
    return written | experts | {"moe_intermediate_size": config.expert_width, "moe_layer_freq": 1}


def _deepseek_read(found: Mapping[str, Any], default: Mapping[str, Any], chosen: Json) -> Json:
    """`chosen` says how experts are chosen; `default` what stands for keys that a file leaves out."""
    bias, rope = found.get("attention_bias", False), _rope_read(found, 10_000.0)
    latent = {key: found[name] for name, key in _LATENT_KEYS.items()}
    keys: Json = {
        "key_value_heads": "auto",
        "head_dim": "auto",
        "mlp": _activation(found, "hidden_act", "silu"),
        "rope": rope | {"pairs": "neighbours"},
        "bias": {"query_key_value": bias, "attention_out": bias},
        "latent": latent,
        "query_scale": _scale_read(found, latent["plain_head_dim"] + latent["rotary_head_dim"]),
    }
    dense = found.get("first_k_dense_replace", default["first"])
    if dense >= found["num_hidden_layers"]:
        return keys
    if found.get("moe_layer_freq", 1) != 1 or not found["n_shared_experts"]:
        raise InvalidError("moe: layers without experts, or experts without shared ones, and this family has neither")
    width = found["moe_intermediate_size"]
    moe = chosen | {
        "experts": found["n_routed_experts"],
        "experts_per_token": found["num_experts_per_tok"],
        "shared_experts": found["n_shared_experts"],
        "dense_layers": dense,
        "routed_scale": found.get("routed_scaling_factor", default["scale"]),
        "auxiliary_loss": found.get("aux_loss_alpha", 0.001),
    }
    return keys | ({"moe": moe | {"expert_width": width}} if dense else {"moe": moe, "mlp_width": width})


def _mscale_written(config: DecoderConfig) -> Json:
    """What makes scores larger where rows are longer than those of old, which these families alone have."""
    scaling = config.rope.scaling
    if config.query_scale == "auto" or scaling is None or scaling.factor <= 1:
        return {}
    growth = math.sqrt(config.query_scale * math.sqrt(config.head_size))
    return {"mscale_all_dim": (growth - 1) / (0.1 * math.log(scaling.factor))}


def _scale_read(found: Mapping[str, Any], head_dim: int) -> float:
    given = found.get("rope_scaling") or found.get("rope_parameters") or {}
    growth = 1.0
    if given.get("mscale_all_dim"):
        growth = 0.1 * given["mscale_all_dim"] * math.log(max(given["factor"], 1)) + 1
    return growth**2 / math.sqrt(head_dim)


_EXPERT_KEYS = {
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "normalise_gates",
}


def _experts_written(config: DecoderConfig, names: Mapping[str, str]) -> Json:
    moe = config.moe
    written = {} if moe is None else {name: getattr(moe, key) for name, key in names.items()}
    return written | {"router_aux_loss_coef": 0.0 if moe is None else moe.auxiliary_loss, "output_router_logits": False}


def _num_experts(found: Mapping[str, Any], default: int) -> int:
    """Version 5 of transformers has one name in every family, and writes the other one of old."""
    return int(found.get("num_experts", found.get("num_local_experts", default)))


def _experts_read(found: Mapping[str, Any], experts: int, per_token: int, is_normalised: bool) -> Json:
    loss = found.get("router_aux_loss_coef", 0.001)
    keys = {"experts": experts, "experts_per_token": per_token, "normalise_gates": is_normalised}
    return {"moe": keys | {"auxiliary_loss": loss}}


FAMILIES: dict[str, Dialect] = {
    family.model_type: family
    for family in (
        Dialect("llama", "LlamaForCausalLM", _write_llama, _read_llama),
        Dialect("mistral", "MistralForCausalLM", _write_mistral, _read_mistral),
        Dialect("qwen2", "Qwen2ForCausalLM", _write_qwen, _read_qwen2),
        Dialect("qwen3", "Qwen3ForCausalLM", _write_qwen3, _read_qwen3),
        Dialect("olmo2", "Olmo2ForCausalLM", _write_olmo2, _read_olmo2, epsilon=1e-5),
        Dialect("mixtral", "MixtralForCausalLM", _write_mixtral, _read_mixtral, epsilon=1e-5),
        Dialect("qwen3_moe", "Qwen3MoeForCausalLM", _write_qwen3_moe, _read_qwen3_moe),
        Dialect("olmoe", "OlmoeForCausalLM", _write_olmoe, _read_olmoe, epsilon=1e-5),
        Dialect("gemma2", "Gemma2ForCausalLM", _write_gemma2, _read_gemma2, is_tied=True),
        Dialect("gemma3_text", "Gemma3ForCausalLM", _write_gemma3, _read_gemma3, is_tied=True),
        Dialect("deepseek_v2", "DeepseekV2ForCausalLM", _write_deepseek_v2, _read_deepseek_v2),
        Dialect("deepseek_v3", "DeepseekV3ForCausalLM", _write_deepseek_v3, _read_deepseek_v3),
        Dialect("smollm3", "SmolLM3ForCausalLM", _write_smollm3, _read_smollm3, is_tied=True),
    )
}
