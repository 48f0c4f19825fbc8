"""Conversion between `DecoderConfig` and the config.json of each family in transformers.

Files of any version of transformers are read, with the family's default for a key that a file leaves out. Files are
written with keys that every version reads. No tensors are involved; `huggingface` names those.

A file with a key that the family does not declare is refused, since such a key may make another model of it. Tables
declare the keys: those that are read, those without effect on the decoder, and those whose values are limited.

To add a family, write a pair of functions, `_write_<family>` and `_read_<family>`, for the keys that are not common to
all families, and add a `ConfigFormat` with these keys to `FAMILIES`.
"""

import json
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from experiments.model.config import DecoderConfig, LayerKind
from experiments.model.layers import CLAMPED_SWIGLU_ALPHA, CLAMPED_SWIGLU_LIMIT
from experiments.model.rotary import LinearScaling, Llama3Scaling, Rope
from runner.console import escape_unprintable
from runner.errors import InvalidError, suggest_choices, suggest_nearest
from runner.storage import JsonObject

Json = JsonObject
# Form in which files hold layers of `extra_predictions`: after the others, or one of them as `mtp`; "" is not at all.
ExtraFiles = Literal["", "layers", "mtp"]


class ConfigFormat(NamedTuple):
    """Form of config.json in one family."""

    model_type: str
    architecture: str
    write: Callable[[DecoderConfig], Json]  # the keys that are not common to all families
    read: Callable[[Json], Json]  # the keys of a DecoderConfig that are not common to all families
    keys: Set[str]  # the keys of config.json that are read, or have no effect, and are not common to all families
    values: Mapping[str, tuple[Any, ...]] = {}  # the keys that are not read, with the values that the decoder has
    epsilon: float = 1e-6  # default of rms_norm_eps
    is_tied: bool = False  # default of tie_word_embeddings
    extra_files: ExtraFiles = ""


# Keys of config.json. `rope.NAME` is a key of `rope_scaling` or `rope_parameters`, or of a kind of layers in it, and
# `rope_parameters.KIND` such a kind.

_COMMON_NAMES = (
    "model_type vocab_size num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads "
    "head_dim rms_norm_eps tie_word_embeddings max_position_embeddings "
    "rope.rope_type rope.type rope.rope_theta rope.original_max_position_embeddings"
)
_IDLE_NAMES = (
    "architectures auto_map transformers_version tokenizer_class tokenizer_padding_side model_max_length "
    "max_sequence_length torch_dtype dtype use_bfloat16 torchscript tf_legacy_loss quantization_config use_cache "
    "cache_implementation gradient_checkpointing attn_implementation pretraining_tp base_model_tp_plan "
    "base_model_pp_plan base_model_ep_plan chunk_size_feed_forward is_decoder unsloth_fixed unsloth_version "
    "is_llama_config transformers.js_config "
    "_name_or_path _commit_hash _attn_implementation _attn_implementation_internal _attn_implementation_autoset "
    "_experts_implementation _experts_implementation_internal _output_attentions _pre_quantization_dtype "
    # Training.
    "initializer_range initializer_factor attention_dropout attn_pdrop embd_pdrop resid_pdrop dropout hidden_dropout "
    "hidden_dropout_prob classifier_dropout router_jitter_noise output_router_logits "
    # Outputs, other heads and the ids of tokens.
    "return_dict output_attentions output_hidden_states output_scores return_dict_in_generate problem_type id2label "
    "label2id num_labels finetuning_task task_specific_params prefix bos_token_id eos_token_id pad_token_id "
    "unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id "
    # Generation.
    "do_sample max_length min_length max_new_tokens early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
)
COMMON_KEYS = frozenset(_COMMON_NAMES.split())
# Keys without effect on the decoder: notes, types of files, settings of generation, of training and of other heads.
_IDLE_KEYS = frozenset(_IDLE_NAMES.split())
# Keys of files that a family may have without reading them, with the values that do not change the decoder.
_IDLE_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "num_kv_shared_layers": (0,),
    "partial_rotary_factor": (1.0,),
    "rope.partial_rotary_factor": (1.0,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, []),
}
# Further keys of rotary positions by their type.
_ROPE_KEYS: Mapping[str, Set[str]] = {
    "default": frozenset(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"},
    "proportional": {"factor", "partial_rotary_factor"},
}


_MAX_PROBLEMS = 16  # a damaged or hostile file may have any number of keys


def describe_unknown_keys(
    config: Mapping[str, Any], family: str, keys: Set[str], values: Mapping[str, tuple[Any, ...]]
) -> str:
    """Return one line about the keys of a config.json that may make another model of it than is built; "" if none.

    A key whose value is null counts as absent. The family reads `keys`, or they have no effect in it. It does not read
    those of `values`, which have the values that the model has.
    """
    entries: list[tuple[str, str, Any]] = []  # path in the file, name in the tables, value
    for section, content in config.items():
        entries.append((section, section, content))
        ropes = [(section, content)] if section in ("rope_scaling", "rope_parameters") else []
        for path, rope in ropes:  # grows by the kinds of layers
            if not isinstance(rope, Mapping):
                continue
            own = _ROPE_KEYS.get(str(rope.get("rope_type", rope.get("type", "default"))))
            for key, value in rope.items():
                if isinstance(value, Mapping):
                    ropes.append((f"{path}.{key}", value))
                # The reader names types that it does not support.
                if own is not None and key not in own:
                    name = f"{path}.{key}" if isinstance(value, Mapping) else f"rope.{key}"
                    entries.append((f"{path}.{key}", name, value))
    limited = {name: allowed for name, allowed in _IDLE_VALUES.items() if name not in keys} | dict(values)
    read = keys | limited.keys() | {f"rope.{key}" for own in _ROPE_KEYS.values() for key in own}
    accepted = (keys | _IDLE_KEYS) - limited.keys()
    problems: dict[str, str] = {}
    for path, name, value in entries:
        if value is None or name in accepted:
            continue
        if len(problems) == _MAX_PROBLEMS:
            break
        path = escape_unprintable(path)
        if name not in limited:
            here = [key.rpartition(".")[2] for key in sorted(read) if ("." in key) == ("." in name)]
            problems[path] = f"unknown key of {family}{suggest_nearest(name.rpartition('.')[2], here)}"
        elif value not in limited[name]:
            got, *needed = (json.dumps(each).strip('"')[:60] for each in (value, *limited[name]))
            problems[path] = f"{got} is not supported in {family}{', only ' if needed else ''}{' or '.join(needed)}"
    if not problems:
        return ""
    return (
        f"{'; '.join(f'{path}: {problem}' for path, problem in problems.items())}; to read the file as if it had no "
        f"such key, set checkpoint.init_from.ignored_config_keys: [{', '.join(problems)}], or give spec-from "
        f"{' '.join(f'--ignore-config-key {path}' for path in problems)}"
    )


def parse_config_json(config: Json, *, is_own: bool = False) -> DecoderConfig:
    """Return the decoder that the content of a config.json describes.

    Args:
        config: content of the file.
        is_own: True if it was written here, maybe for a family that lacks a part of the decoder. Its keys are not
            checked, so that what differs is the decoder.

    Raises:
        InvalidError: the family is unknown, the file has keys that it does not know, or it describes no decoder of it;
            the message is one line.
    """
    config = find_text_config(config)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InvalidError(f"model_type: got {str(name)[:60]!r}{suggest_choices(str(name), list(FAMILIES))}")
    family = FAMILIES[name]
    unknown = "" if is_own else describe_unknown_keys(config, name, COMMON_KEYS | family.keys, family.values)
    if unknown:
        raise InvalidError(unknown)
    heads = config.get("num_attention_heads")
    try:
        own = family.read(config)
        common = {
            "layers": config["num_hidden_layers"],
            "width": config["hidden_size"],
            "heads": heads,
            "key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or "auto",
            "mlp_width": own.get("mlp_width") or config["intermediate_size"],
            "norm_epsilon": config.get("rms_norm_eps", family.epsilon),
            "tied_embedding": config.get("tie_word_embeddings", family.is_tied),
        }
        # The family comes last, since it may replace a common key by its own meaning of it.
        return DecoderConfig(**common | own)
    except KeyError as error:
        raise InvalidError(f"{error.args[0]}: is missing from config.json") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "model"
        raise InvalidError(f"{key}: {first['msg']}") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
        # Keys are read before they are validated, and a file may hold anything.
        raise InvalidError(f"a value has the wrong type, or contradicts another one: {error}") from None


def read_model_keys(config: Json) -> Json:
    """Return the keys of `config.model` for the content of a config.json, with the size of the vocabulary.

    Raises as `parse_config_json` does.
    """
    text = find_text_config(config)
    keys: Json = parse_config_json(config).model_dump(mode="json")
    # The files of Gemma leave out what its models have in common.
    size = text.get("vocab_size", {"gemma3_text": 262_208, "gemma4_text": 262_144}.get(text["model_type"]))
    if size is None:
        raise InvalidError("vocab_size: is missing from config.json")
    return keys | {"vocabulary_size": size}


def find_text_config(config: Json) -> Json:
    """Return the part of a config.json that describes the decoder of text.

    Models that also read images, such as Gemma 3 from 4B on, nest it in `text_config`.
    """
    text = config.get("text_config")
    return text if isinstance(text, dict) and text.get("model_type") in FAMILIES else config


# Parts that several families share: rotary positions, the MLP's activation, windows, experts.


def _write_rope(rope: Rope) -> Json:
    scaling = rope.scaling
    written: Json | None = None
    if isinstance(scaling, LinearScaling):
        written = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None:
        original = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_positions}
        if isinstance(scaling, Llama3Scaling):
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            written = {"rope_type": "llama3", **original, "low_freq_factor": low, "high_freq_factor": high}
        else:
            betas = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            written = {"rope_type": "yarn", **original, **betas}
            if scaling.attention_factor != "auto":
                written["attention_factor"] = scaling.attention_factor
            if not scaling.truncate:
                written["truncate"] = False
    return {"rope_theta": rope.theta, "rope_scaling": written}


def _write_ropes_by_kind(config: DecoderConfig) -> Json:
    """Return the rotary positions of each kind of layers, in the form of version 5 of transformers."""
    ropes = {"full_attention": config.rope, "sliding_attention": config.window_rope or config.rope}
    written = {kind: _write_rope(rope) for kind, rope in ropes.items()}
    return {
        kind: {"rope_type": "default", **(rope["rope_scaling"] or {}), "rope_theta": rope["rope_theta"]}
        for kind, rope in written.items()
    }


def _read_rope(config: Json, theta: float, kind: str | None = None) -> Json:
    """Return the keys of a `Rope`. Version 5 of transformers has `rope_parameters`, older ones `rope_scaling`.

    `theta` is the family's default, and `kind` a kind of layers, in families whose files may have positions for each.
    """
    given = config.get("rope_parameters") or {}
    given = given.get(kind, {}) if kind is not None and kind in given else given
    scaling = config.get("rope_scaling") or given
    return {
        "theta": given.get("rope_theta", config.get("rope_theta", theta)),
        "scaling": _read_scaling(scaling, config),
    }


def _read_window_rope(config: Json, theta: float) -> Json:
    """Return the keys of the `Rope` of window layers; `theta` is that of files without rotary positions by kind.

    The scaling of such files, `rope_scaling`, is of the full layers alone.
    """
    given = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    return {"theta": given.get("rope_theta", theta), "scaling": _read_scaling(given, config)}


def _read_scaling(given: Json, config: Json) -> Json | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return {"name": "linear", "factor": given["factor"]}
    # Files that leave it out mean the positions of the model as it was trained.
    original = given.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if kind == "llama3":
        factors = {"low_frequency_factor": given["low_freq_factor"], "high_frequency_factor": given["high_freq_factor"]}
        return {"name": "llama3", "factor": given["factor"], "original_positions": original, **factors}
    if kind != "yarn":
        raise InvalidError(f"rope: {kind} scaling is not supported; use linear, llama3 or yarn")
    # DeepSeek's models give the attention factor of YaRN as a quotient of two.
    numerator, denominator = given.get("mscale"), given.get("mscale_all_dim")
    factor: float | str = "auto"
    if given.get("attention_factor") is not None:
        factor = float(given["attention_factor"])
    elif numerator and denominator:
        above, below = (0.1 * scale * math.log(max(given["factor"], 1)) + 1 for scale in (numerator, denominator))
        factor = float(above / below)
    return {
        "name": "yarn",
        "factor": given["factor"],
        "original_positions": original,
        "attention_factor": factor,
        "beta_fast": given.get("beta_fast") or 32.0,
        "beta_slow": given.get("beta_slow") or 1.0,
        "truncate": given.get("truncate", True),
    }


def _write_activation(config: DecoderConfig) -> Json:
    return {"hidden_act": "gelu_pytorch_tanh" if config.mlp == "geglu" else "silu"}


def _read_attention_bias(config: Json) -> Json:
    """Return the `bias` section of families in which all matmuls of attention have a bias, or none has."""
    bias = config.get("attention_bias", False)
    return {"query_key_value": bias, "attention_out": bias}


def _read_activation(config: Json, key: str, default: str) -> str:
    name = config.get(key, default) or default
    known = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
    if name not in known:
        raise InvalidError(f"mlp: activation {name} is not supported; the decoder has {' and '.join(known)}")
    return known[name]


def _write_windows(config: DecoderConfig) -> Json:
    """Return the window keys of families that list the kind of every layer."""
    types = ["sliding_attention" if kind == "window" else "full_attention" for kind in config.layer_kinds]
    return {"sliding_window": config.window, "layer_types": types}


def _read_windows(config: Json, default: Callable[[int], LayerKind]) -> Json:
    """Return the window keys of a decoder; `default` gives the kind of a layer where the file has no list."""
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        kinds = [default(layer) for layer in range(layers)]
    else:
        kinds = ["window" if kind == "sliding_attention" else "full" for kind in types]
    window = config.get("sliding_window") if "window" in kinds else None
    return {"layer_pattern": _find_pattern(kinds), "window": window}


def _find_pattern(kinds: list[LayerKind]) -> list[LayerKind]:
    """Return the shortest pattern that repeats to these layers."""
    # The shortest pattern compiles fastest, because layers are looped over by repetitions of it.
    lengths = range(1, len(kinds) + 1)
    fitting = (kinds[:n] for n in lengths if all(kind == kinds[layer % n] for layer, kind in enumerate(kinds)))
    return next(fitting, kinds)


_EXPERT_KEYS = {
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "normalise_gates",
}
_LOCAL_EXPERT_KEYS = {"num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"}


def _write_experts(config: DecoderConfig, names: Mapping[str, str]) -> Json:
    moe = config.moe
    written = {} if moe is None else {name: getattr(moe, key) for name, key in names.items()}
    return written | {"router_aux_loss_coef": 0.0 if moe is None else moe.auxiliary_loss, "output_router_logits": False}


def _read_experts(config: Json, experts: int, per_token: int, is_normalised: bool) -> Json:
    """Return the `moe` section; `experts` and `per_token` are the family's defaults."""
    local: Any = config.get("num_local_experts", experts)
    moe = {
        # Version 5 of transformers has one name in every family, and also writes the older one.
        "experts": int(config.get("num_experts", local)),
        "experts_per_token": config.get("num_experts_per_tok", per_token),
        "normalise_gates": is_normalised,
        "auxiliary_loss": config.get("router_aux_loss_coef", 0.001),
    }
    return {"moe": moe}


# Families.


def _write_llama(config: DecoderConfig) -> Json:
    biases = {"attention_bias": config.bias.query_key_value, "mlp_bias": config.bias.mlp}
    return _write_activation(config) | _write_rope(config.rope) | biases


def _read_llama(config: Json) -> Json:
    return {
        "mlp": _read_activation(config, "hidden_act", "silu"),
        "rope": _read_rope(config, 10_000.0),
        "bias": _read_attention_bias(config) | {"mlp": config.get("mlp_bias", False)},
    }


def _write_mistral(config: DecoderConfig) -> Json:
    rope = config.window_rope or config.rope
    return _write_activation(config) | _write_rope(rope) | {"sliding_window": config.window}


def _read_mistral(config: Json) -> Json:
    window = config.get("sliding_window", 4096)
    return {
        "mlp": _read_activation(config, "hidden_act", "silu"),
        "rope": _read_rope(config, 10_000.0),
        "layer_pattern": ["full" if window is None else "window"],
        "window": window,
    }


def _write_qwen(config: DecoderConfig) -> Json:
    windows = _write_windows(config) | {"use_sliding_window": config.window is not None}
    return _write_activation(config) | _write_rope(config.rope) | windows | {"max_window_layers": config.layers}


def _read_qwen(config: Json) -> Json:
    has_windows, first = config.get("use_sliding_window", False), config.get("max_window_layers", 28)
    windows = _read_windows(config, lambda layer: "window" if has_windows and layer >= first else "full")
    return {"mlp": _read_activation(config, "hidden_act", "silu"), "rope": _read_rope(config, 10_000.0), **windows}


def _write_qwen3(config: DecoderConfig) -> Json:
    return _write_qwen(config) | {"attention_bias": config.bias.query_key_value}


def _read_qwen3(config: Json) -> Json:
    return _read_qwen(config) | {"bias": _read_attention_bias(config), "query_key_norm": "head"}


def _write_olmo2(config: DecoderConfig) -> Json:
    biases = {"attention_bias": config.bias.query_key_value}
    return _write_activation(config) | _write_rope(config.rope) | biases


def _read_olmo2(config: Json) -> Json:
    return _read_llama(config | {"mlp_bias": False}) | {"norm": "post", "query_key_norm": "whole"}


def _write_olmo3(config: DecoderConfig) -> Json:
    # Version 5 of transformers would take the default for the theta of windows if it found only the older keys.
    return _write_olmo2(config) | _write_windows(config) | {"rope_parameters": _write_ropes_by_kind(config)}


def _read_olmo3(config: Json) -> Json:
    windows = _read_windows({"sliding_window": 4096} | config, lambda layer: "window" if (layer + 1) % 4 else "full")
    keys = _read_olmo2(config) | {"rope": _read_rope(config, 500_000.0, "full_attention"), **windows}
    if "window" in keys["layer_pattern"]:
        keys["window_rope"] = _read_window_rope(config, config.get("rope_theta", 500_000.0))
    return keys


def _write_smollm3(config: DecoderConfig) -> Json:
    rotated = [int(kind != "no_rope") for kind in config.layer_kinds]
    windows = {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * config.layers}
    return _write_llama(config) | windows | {"no_rope_layers": rotated}


def _read_smollm3(config: Json) -> Json:
    # A layer whose entry in `no_rope_layers` is 1 has rotary positions, despite the name.
    interval = config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(layer + 1) % interval for layer in range(config["num_hidden_layers"])]
    if config.get("use_sliding_window", False):
        raise InvalidError("window: layers with a window and without rotary positions are not supported")
    kinds: list[LayerKind] = ["full" if is_rotated else "no_rope" for is_rotated in rotated]
    return _read_llama({"rope_theta": 2_000_000.0} | config) | {"layer_pattern": _find_pattern(kinds)}


def _write_gemma2(config: DecoderConfig) -> Json:
    scale = config.head_size**-0.5 if config.query_scale == "auto" else config.query_scale
    return (
        {"hidden_activation": "silu" if config.mlp == "swiglu" else "gelu_pytorch_tanh"}
        | _write_rope(config.rope)
        | _write_windows(config)
        | {"query_pre_attn_scalar": round(scale**-2), "attention_bias": config.bias.query_key_value}
        | {"final_logit_softcapping": config.logit_softcap, "attn_logit_softcapping": config.attention_softcap}
    )


def _read_gemma(config: Json, pattern: int, softcap: float | None) -> Json:
    """Return what Gemma 2 to 4 share; `pattern` and `softcap` are defaults: layers up to a full one, and of logits."""
    return {
        "mlp": _read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "head_dim": config.get("head_dim", 256),
        "norm": "both",
        "norm_offset": True,
        "embedding_scale": "sqrt_width",
        "logit_softcap": config.get("final_logit_softcapping", softcap),
        "bias": _read_attention_bias(config),
        **_read_windows(config, lambda layer: "window" if (layer + 1) % pattern else "full"),
    }


def _read_gemma2(config: Json) -> Json:
    config = {"sliding_window": 4096} | config
    own: Json = {"query_scale": config.get("query_pre_attn_scalar", 256) ** -0.5}
    own["attention_softcap"] = config.get("attn_logit_softcapping", 50.0)
    return _read_gemma(config, 2, 30.0) | own | {"rope": _read_rope(config, 10_000.0)}


def _write_gemma3(config: DecoderConfig) -> Json:
    local = (config.window_rope or config.rope).theta
    return _write_gemma2(config) | {"rope_local_base_freq": local, "attn_logit_softcapping": None}


def _read_gemma3(config: Json) -> Json:
    # Files of the family leave out keys that have the defaults of its 4B model.
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096} | config
    keys = _read_gemma(config, config.get("sliding_window_pattern", 6), None) | {"query_key_norm": "head"}
    keys |= {"heads": config["num_attention_heads"], "key_value_heads": config["num_key_value_heads"]}
    keys["query_scale"] = config.get("query_pre_attn_scalar", 256) ** -0.5
    keys["rope"] = _read_rope(config, 1_000_000.0, "full_attention")
    if "window" in keys["layer_pattern"]:
        keys["window_rope"] = _read_window_rope(config, config.get("rope_local_base_freq", 10_000.0))
    return keys


_GEMMA4_HEADS = {"head_dim": "head_dim", "num_key_value_heads": "key_value_heads"}


def _write_gemma4(config: DecoderConfig) -> Json:
    full, sharing, moe = config.full_heads, config.key_value_sharing, config.moe
    parameters = _write_ropes_by_kind(config)
    for kind, rope in (("full_attention", config.rope), ("sliding_attention", config.window_rope or config.rope)):
        if rope.proportional:
            factor = {} if rope.scaling is None else {"factor": rope.scaling.factor}
            parameters[kind] |= {"rope_type": "proportional", "partial_rotary_factor": rope.fraction, **factor}
    written = {
        "hidden_activation": "silu" if config.mlp == "swiglu" else "gelu_pytorch_tanh",
        "rope_parameters": parameters,
        "attention_bias": config.bias.query_key_value,
        "final_logit_softcapping": config.logit_softcap,
        "global_head_dim": config.get_head_size("full"),
        "num_global_key_value_heads": config.get_key_heads("full"),
        "attention_k_eq_v": full is not None and full.keys_as_values,
        "num_kv_shared_layers": 0 if sharing is None else sharing.layers,
        "use_double_wide_mlp": sharing is not None and sharing.mlp_width == 2 * config.mlp_width,
        "hidden_size_per_layer_input": config.layer_embedding_width or 0,
        "use_bidirectional_attention": None,
        "enable_moe_block": moe is not None,
    } | _write_windows(config)
    # transformers makes a mask of this window even if no layer has one.
    written["sliding_window"] = config.window or 512
    if moe is not None:
        written |= {"num_experts": moe.experts, "top_k_experts": moe.experts_per_token}
        written |= {"moe_intermediate_size": config.expert_width, "router_aux_loss_coef": moe.auxiliary_loss}
    return written


def _read_gemma4(config: Json) -> Json:
    # Files of the family leave out keys that have the defaults of the library.
    defaults: Json = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512}
    config = defaults | {"hidden_size_per_layer_input": 256} | config
    layers, vocabulary = config["num_hidden_layers"], config.get("vocab_size", 262_144)
    types = config.get("layer_types") or ["full" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]
    # transformers makes the last layer a full one.
    config["layer_types"] = [*types[:-1], "full_attention"]
    keys = _read_gemma(config, 6, None)

    # Heads of full layers: two keys, or since version 5.2 all that differs in each layer.
    shares_keys, heads = bool(config.get("attention_k_eq_v")), {"head_dim": config.get("global_head_dim", 512)}
    if shares_keys and config.get("num_global_key_value_heads") is not None:
        heads["num_key_value_heads"] = config["num_global_key_value_heads"]
    if "per_layer_config" in config:
        by_layer = {int(layer): changes for layer, changes in config["per_layer_config"].items() if changes}
        full = [layer for layer in range(layers) if config["layer_types"][layer] != "sliding_attention"]
        heads = by_layer.get(full[0], {})
        if not heads.keys() <= _GEMMA4_HEADS.keys() or by_layer != (dict.fromkeys(full, heads) if heads else {}):
            raise InvalidError(
                "per_layer_config: full layers must be alike, and differ from the others in head_dim and "
                f"num_key_value_heads alone; got {str(config['per_layer_config'])[:200]}"
            )
    own = {key: heads[name] for name, key in _GEMMA4_HEADS.items() if name in heads} | {"keys_as_values": shares_keys}
    keys |= {"heads": config["num_attention_heads"], "key_value_heads": config["num_key_value_heads"]}
    keys |= {"norm_offset": False, "query_scale": 1.0, "query_key_norm": "head", "value_norm": True}
    keys |= {
        "full_heads": own,
        "layer_scale": True,
        "layer_embedding_width": config["hidden_size_per_layer_input"] or None,
    }
    own_vocabulary = config.get("vocab_size_per_layer_input", vocabulary)
    if keys["layer_embedding_width"] and own_vocabulary != vocabulary:
        raise InvalidError(
            f"vocab_size_per_layer_input: {own_vocabulary} is not supported; needs vocab_size, {vocabulary}"
        )
    given = config.get("rope_parameters") or {"full_attention": {"rope_type": "proportional"}}
    for name, kind, theta in (("rope", "full_attention", 1_000_000.0), ("window_rope", "sliding_attention", 10_000.0)):
        rope = given.get(kind) or {}
        keys[name] = {"theta": rope.get("rope_theta", theta)}
        if rope.get("rope_type") != "proportional":
            keys[name]["scaling"] = _read_scaling(rope, config)
            continue
        fraction = rope.get("partial_rotary_factor", 1.0 if config.get("rope_parameters") else 0.25)
        keys[name] |= {"proportional": True, "fraction": fraction}
        if rope.get("factor", 1.0) != 1.0:
            keys[name]["scaling"] = {"name": "linear", "factor": rope["factor"]}
    if "window" not in keys["layer_pattern"]:
        del keys["window_rope"]
    if config.get("num_kv_shared_layers"):
        width = 2 * config["intermediate_size"] if config.get("use_double_wide_mlp") else "auto"
        keys["key_value_sharing"] = {"layers": config["num_kv_shared_layers"], "mlp_width": width}
    if config.get("enable_moe_block"):
        keys["moe"] = {
            "experts": config["num_experts"],
            "experts_per_token": config["top_k_experts"],
            "expert_width": config["moe_intermediate_size"],
            "auxiliary_loss": config.get("router_aux_loss_coef", 0.001),
            "beside_mlp": True,
            "scaled_router": True,
        }
    return keys


def _write_mixtral(config: DecoderConfig) -> Json:
    return _write_mistral(config) | _write_experts(config, _LOCAL_EXPERT_KEYS)


def _read_mixtral(config: Json) -> Json:
    keys = _read_mistral({"sliding_window": None, "rope_theta": 1_000_000.0} | config)
    return keys | _read_experts(config, 8, 2, True)


def _write_qwen3_moe(config: DecoderConfig) -> Json:
    dense = 0 if config.moe is None else config.moe.dense_layers
    widths = {"moe_intermediate_size": config.expert_width, "mlp_only_layers": list(range(dense))}
    return _write_qwen3(config) | _write_experts(config, _EXPERT_KEYS) | widths | {"decoder_sparse_step": 1}


def _read_qwen3_moe(config: Json) -> Json:
    experts = _read_experts(config, 128, 8, config.get("norm_topk_prob", False))
    return _read_qwen3(config) | _read_dense_layers(config, experts["moe"], 768)


def _read_dense_layers(config: Json, moe: Json, default: int) -> Json:
    """Return the `moe` section and the widths of Qwen's models; `default` is the family's width of an expert."""
    dense = config.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))) or config.get("decoder_sparse_step", 1) != 1:
        raise InvalidError("moe.dense_layers: layers without experts must be the first ones in this decoder")
    width = config.get("moe_intermediate_size", default)
    # Without dense layers `mlp_width` is the width of an expert, and no second width is needed.
    if not dense:
        return {"moe": moe, "mlp_width": width}
    return {"moe": moe | {"dense_layers": len(dense), "expert_width": width}}


_LINEAR_KEYS = {
    "linear_num_key_heads": ("key_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_head_dim", 128),
    "linear_value_head_dim": ("value_head_dim", 128),
    "linear_conv_kernel_dim": ("conv_width", 4),
}


def _write_hybrid(config: DecoderConfig) -> Json:
    """Return the keys of Qwen3-Next, and of Qwen3.5 with and without experts."""
    types = ["linear_attention" if kind == "linear" else "full_attention" for kind in config.layer_kinds]
    rope = _write_rope(config.rope) | {"partial_rotary_factor": config.rope.fraction}
    keys = _write_activation(config) | rope | {"attention_bias": config.bias.query_key_value, "layer_types": types}
    if config.linear is not None:
        keys |= {name: getattr(config.linear, key) for name, (key, _) in _LINEAR_KEYS.items()}
    if config.moe is None:
        return keys | {"num_experts": 0}
    dense = {"mlp_only_layers": list(range(config.moe.dense_layers)), "decoder_sparse_step": 1}
    widths = {"moe_intermediate_size": config.expert_width, "shared_expert_intermediate_size": config.shared_width}
    return keys | _write_experts(config, _EXPERT_KEYS) | dense | widths


def _read_hybrid(config: Json) -> Json:
    is_next = config["model_type"] == "qwen3_next"
    interval = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    kinds: list[LayerKind] = ["linear" if kind == "linear_attention" else "full" for kind in types]
    linear = {key: config.get(name, default) for name, (key, default) in _LINEAR_KEYS.items()}
    linear["projections"] = "fused" if is_next else "separate"
    if _read_activation(config, "hidden_act", "silu") != "swiglu":
        raise InvalidError("mlp: this family needs swiglu, whose SiLU its linear layers have too")
    if not is_next:
        # transformers reads neither key in Qwen3.5.
        config = config | {"norm_topk_prob": True, "mlp_only_layers": []}
    rope = config.get("rope_parameters") or {}
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    keys = {
        "head_dim": config.get("head_dim") or 256,
        "norm_offset": True,
        "query_key_norm": "head",
        "attention_gate": True,
        "bias": _read_attention_bias(config),
        "rope": _read_rope(config, 10_000.0) | {"fraction": fraction},
        "layer_pattern": _find_pattern(kinds),
        "linear": linear if "linear" in kinds else None,
    }
    experts, per_token = (512, 10) if is_next else (256, 8)
    if config["model_type"] == "qwen3_5_text" or config.get("num_experts") == 0:
        return keys
    moe = _read_experts(config, experts, per_token, config.get("norm_topk_prob", True))["moe"]
    moe |= {"shared_experts": 1, "shared_gate": True}
    moe["shared_width"] = config.get("shared_expert_intermediate_size", 512)
    return keys | _read_dense_layers(config, moe, 512)


def _write_olmoe(config: DecoderConfig) -> Json:
    return _write_llama(config) | _write_experts(config, _EXPERT_KEYS) | {"clip_qkv": None}


def _read_olmoe(config: Json) -> Json:
    if config.get("clip_qkv") is not None:
        raise InvalidError("clip_qkv: clipped queries, keys and values are not supported")
    keys = _read_experts(config, 64, 8, config.get("norm_topk_prob", False))
    return _read_llama(config | {"mlp_bias": False}) | keys | {"query_key_norm": "whole"}


_GPT_OSS_ROPE = {  # of files without rotary keys
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _write_gpt_oss(config: DecoderConfig) -> Json:
    rope = _write_rope(config.rope)
    if rope["rope_scaling"] is None:  # the family's scaling would stand in for it
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta}}
    return {
        **rope,
        **_write_experts(config, _LOCAL_EXPERT_KEYS),
        # transformers makes a mask of this window even if no layer has one.
        **_write_windows(config),
        "sliding_window": config.window or 128,
        "attention_bias": config.bias.query_key_value,
        "hidden_act": "silu",
        "swiglu_limit": CLAMPED_SWIGLU_LIMIT,
        "swiglu_alpha": CLAMPED_SWIGLU_ALPHA,
    }


def _read_gpt_oss(config: Json) -> Json:
    for key, value in (("swiglu_limit", CLAMPED_SWIGLU_LIMIT), ("swiglu_alpha", CLAMPED_SWIGLU_ALPHA)):
        if config.get(key, value) != value:
            raise InvalidError(f"mlp: {key} {config[key]} is not supported; this decoder's clamped_swiglu has {value}")
    if not config.get("attention_bias", True):
        raise InvalidError("bias: attention_bias false is not supported in this family; it has biases in every matmul")
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = config | {"rope_scaling": _GPT_OSS_ROPE}
    windows = _read_windows({"sliding_window": 128} | config, lambda layer: "full" if layer % 2 else "window")
    keys = {"mlp": "clamped_swiglu", "attention_sinks": True, "head_dim": config.get("head_dim") or 64}
    biases = {"bias": {"query_key_value": True, "attention_out": True}}
    experts = _read_experts(config, 128, 4, True)
    return keys | biases | windows | {"rope": _read_rope(config, 150_000.0), "moe": experts["moe"] | {"bias": True}}


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


def _write_deepseek(config: DecoderConfig) -> Json:
    latent, moe, scaling = config.latent, config.moe, config.rope.scaling
    biases = {"attention_bias": config.bias.query_key_value}
    written: Json = _write_activation(config) | _write_rope(config.rope) | biases
    if latent is not None:
        written |= {name: getattr(latent, key) for name, key in _LATENT_KEYS.items()}
        # transformers computes the rotation from this key, and only these dimensions are rotated.
        written |= {"head_dim": latent.rotary_head_dim}
    # These families alone write the factor on scores as a part of the scaling: `mscale_all_dim`.
    if config.query_scale != "auto" and scaling is not None and scaling.factor > 1:
        growth = math.sqrt(config.query_scale * math.sqrt(config.head_size))
        written["rope_scaling"] |= {"mscale_all_dim": (growth - 1) / (0.1 * math.log(scaling.factor))}
    if moe is None:
        return written | {"first_k_dense_replace": config.layers}
    experts = {name: getattr(moe, key) for name, key in _DEEPSEEK_EXPERT_KEYS.items()}
    return written | experts | {"moe_intermediate_size": config.expert_width, "moe_layer_freq": 1}


def _read_deepseek(config: Json, router: Json, *, dense_layers: int, routed_scale: float) -> Json:
    """Return what DeepSeek's families share; `router` are keys of `moe`, and the numbers the family's defaults."""
    rope, latent = _read_rope(config, 10_000.0), {key: config[name] for name, key in _LATENT_KEYS.items()}
    given, growth = config.get("rope_scaling") or config.get("rope_parameters") or {}, 1.0
    if given.get("mscale_all_dim"):
        growth = 0.1 * given["mscale_all_dim"] * math.log(max(given["factor"], 1)) + 1
    keys: Json = {
        "key_value_heads": "auto",
        "head_dim": "auto",
        "mlp": _read_activation(config, "hidden_act", "silu"),
        "rope": rope | {"pairs": "neighbours"},
        "bias": _read_attention_bias(config),
        "latent": latent,
        "query_scale": growth**2 / math.sqrt(latent["plain_head_dim"] + latent["rotary_head_dim"]),
    }
    dense = config.get("first_k_dense_replace", dense_layers)
    if dense >= config["num_hidden_layers"]:
        return keys
    if config.get("moe_layer_freq", 1) != 1 or not config["n_shared_experts"]:
        raise InvalidError("moe: this family needs experts in every layer after the dense ones, and shared experts")
    width = config["moe_intermediate_size"]
    moe = router | {
        "experts": config["n_routed_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "shared_experts": config["n_shared_experts"],
        "dense_layers": dense,
        "routed_scale": config.get("routed_scaling_factor", routed_scale),
        "auxiliary_loss": config.get("aux_loss_alpha", 0.001),
    }
    return keys | ({"moe": moe | {"expert_width": width}} if dense else {"moe": moe, "mlp_width": width})


def _write_deepseek_v2(config: DecoderConfig) -> Json:
    is_limited = config.moe is not None and config.moe.groups_per_token < config.moe.groups
    method = {"topk_method": "group_limited_greedy" if is_limited else "greedy"}
    return _write_deepseek(config) | method | {"mlp_bias": config.bias.mlp}


def _read_deepseek_v2(config: Json) -> Json:
    if config.get("norm_topk_prob") or config.get("mlp_bias"):
        raise InvalidError("moe.normalise_gates, bias.mlp: transformers supports neither in this family")
    method, groups = config.get("topk_method", "greedy"), {"groups": 1, "groups_per_token": 1}
    if method == "group_limited_greedy":
        groups = {"groups": config["n_group"], "groups_per_token": config["topk_group"]}
    elif method != "greedy":
        raise InvalidError(f"moe: topk_method {method} is not supported; use greedy or group_limited_greedy")
    router = {"gate": "softmax", "normalise_gates": False, "group_score": "max", **groups}
    return _read_deepseek(config, router, dense_layers=0, routed_scale=1.0)


def _write_deepseek_v3(config: DecoderConfig) -> Json:
    interleaved = {
        "rope_interleave": config.rope.pairs == "neighbours",
        "num_nextn_predict_layers": config.extra_predictions,
    }
    return _write_deepseek(config) | interleaved


def _read_deepseek_v3(config: Json) -> Json:
    router = {
        "gate": "sigmoid",
        "normalise_gates": config.get("norm_topk_prob", True),
        "groups": config.get("n_group", 8),
        "groups_per_token": config.get("topk_group", 4),
        "bias_rate": 0.001,
    }
    keys = _read_deepseek(config, router, dense_layers=3, routed_scale=2.5)
    if not config.get("rope_interleave", True):
        keys["rope"]["pairs"] = "halves"
    return keys


_ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
_ROPE_KINDS = frozenset({"rope_parameters.full_attention", "rope_parameters.sliding_attention"})
_LLAMA = _ROPE | {"hidden_act", "attention_bias", "mlp_bias"}
_OLMO2 = _ROPE | {"hidden_act", "attention_bias"}
_WINDOWS = frozenset({"sliding_window", "layer_types"})
_QWEN = _ROPE | _WINDOWS | {"hidden_act", "use_sliding_window", "max_window_layers"}
_EXPERTS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"})
_QWEN_EXPERTS = _EXPERTS | {"norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size"}
_GEMMA = _WINDOWS | {"hidden_activation", "attention_bias", "final_logit_softcapping"}
_GEMMA2 = _GEMMA | _ROPE | {"query_pre_attn_scalar"}
_GEMMA2_VALUES = {"hidden_act": ("gelu_pytorch_tanh",)}  # transformers reads hidden_activation
_DEEPSEEK = _ROPE | _LATENT_KEYS.keys() | _DEEPSEEK_EXPERT_KEYS.keys() | {"hidden_act", "attention_bias"}
# `qk_head_dim` is the sum of two others, and `seq_aux` a form of the auxiliary loss.
_DEEPSEEK |= {"moe_intermediate_size", "moe_layer_freq", "qk_head_dim", "seq_aux"}
_HYBRID = _ROPE | _LINEAR_KEYS.keys() | {"hidden_act", "attention_bias", "layer_types", "full_attention_interval"}
_HYBRID |= {"partial_rotary_factor", "rope.partial_rotary_factor"}
# Positions of images have three axes, which are alike in text.
_QWEN3_5 = _HYBRID | {"rope.mrope_section", "rope.mrope_interleaved", "mtp_num_hidden_layers"}
_QWEN3_5_VALUES = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": ("swish",),
    "mtp_use_dedicated_embeddings": (False,),
    "norm_topk_prob": (True,),
    "mlp_only_layers": ([],),
}

FAMILIES: dict[str, ConfigFormat] = {
    family.model_type: family
    for family in (
        ConfigFormat("llama", "LlamaForCausalLM", _write_llama, _read_llama, _LLAMA),
        ConfigFormat(
            "mistral", "MistralForCausalLM", _write_mistral, _read_mistral, _ROPE | {"hidden_act", "sliding_window"}
        ),
        ConfigFormat(
            "qwen2",
            "Qwen2ForCausalLM",
            _write_qwen,
            lambda config: _read_qwen(config) | {"bias": {"query_key_value": True}},
            _QWEN | {"attention_bias"},  # transformers does not read it either; tensors show the biases
        ),
        ConfigFormat("qwen3", "Qwen3ForCausalLM", _write_qwen3, _read_qwen3, _QWEN | {"attention_bias"}),
        ConfigFormat("olmo2", "Olmo2ForCausalLM", _write_olmo2, _read_olmo2, _OLMO2, epsilon=1e-5),
        ConfigFormat(
            "olmo3", "Olmo3ForCausalLM", _write_olmo3, _read_olmo3, _OLMO2 | _WINDOWS | _ROPE_KINDS, epsilon=1e-5
        ),
        ConfigFormat(
            "mixtral",
            "MixtralForCausalLM",
            _write_mixtral,
            _read_mixtral,
            _ROPE | _EXPERTS | {"hidden_act", "sliding_window"},
            epsilon=1e-5,
        ),
        ConfigFormat(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _write_qwen3_moe,
            _read_qwen3_moe,
            _QWEN | _QWEN_EXPERTS | {"attention_bias"},
        ),
        ConfigFormat(
            "olmoe",
            "OlmoeForCausalLM",
            _write_olmoe,
            _read_olmoe,
            _OLMO2 | _EXPERTS | {"norm_topk_prob", "clip_qkv"},
            epsilon=1e-5,
        ),
        ConfigFormat(
            "gpt_oss",
            "GptOssForCausalLM",
            _write_gpt_oss,
            _read_gpt_oss,
            # The last two repeat other keys, for other readers.
            _ROPE
            | _EXPERTS
            | _WINDOWS
            | {"attention_bias", "swiglu_limit", "swiglu_alpha"}
            | {"experts_per_token", "initial_context_length"},
            {"hidden_act": ("silu",)},
            epsilon=1e-5,
        ),
        ConfigFormat(
            "gemma2",
            "Gemma2ForCausalLM",
            _write_gemma2,
            _read_gemma2,
            _GEMMA2 | {"attn_logit_softcapping", "sliding_window_size"},
            _GEMMA2_VALUES,
            is_tied=True,
        ),
        ConfigFormat(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _write_gemma3,
            _read_gemma3,
            _GEMMA2 | _ROPE_KINDS | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
            _GEMMA2_VALUES | {"attn_logit_softcapping": ()},
            is_tied=True,
        ),
        ConfigFormat(
            "gemma4_text",
            "Gemma4ForCausalLM",
            _write_gemma4,
            _read_gemma4,
            _GEMMA
            | _ROPE_KINDS
            | {"rope_parameters", "per_layer_config"}
            | {"global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"}
            | {"num_kv_shared_layers", "use_double_wide_mlp"}
            | {"hidden_size_per_layer_input", "vocab_size_per_layer_input"}
            | {"enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size", "router_aux_loss_coef"},
            # In text alone, which has no images to look at in both directions, `vision` means false.
            {"use_bidirectional_attention": (False, "vision")},
            is_tied=True,
        ),
        ConfigFormat(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            _write_deepseek_v2,
            _read_deepseek_v2,
            _DEEPSEEK | {"topk_method", "mlp_bias"},
            {"scoring_func": ("softmax",), "ep_size": (1,)},
        ),
        ConfigFormat(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            _write_deepseek_v3,
            _read_deepseek_v3,
            _DEEPSEEK | {"rope_interleave", "num_nextn_predict_layers"},
            {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "ep_size": (1,)},
            extra_files="layers",
        ),
        ConfigFormat(
            "smollm3",
            "SmolLM3ForCausalLM",
            _write_smollm3,
            _read_smollm3,
            # Without `use_sliding_window` the other keys of windows have no effect.
            _LLAMA | _WINDOWS | {"no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "max_window_layers"},
            is_tied=True,
        ),
        ConfigFormat(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            _write_hybrid,
            _read_hybrid,
            _HYBRID | _QWEN_EXPERTS | {"shared_expert_intermediate_size"},
            extra_files="mtp",
        ),
        ConfigFormat(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            _write_hybrid,
            _read_hybrid,
            _QWEN3_5,
            _QWEN3_5_VALUES | {"num_experts": (0,)},
            extra_files="mtp",
        ),
        ConfigFormat(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            _write_hybrid,
            _read_hybrid,
            _QWEN3_5 | _EXPERTS | {"decoder_sparse_step", "moe_intermediate_size", "shared_expert_intermediate_size"},
            _QWEN3_5_VALUES,
            extra_files="mtp",
        ),
    )
}
