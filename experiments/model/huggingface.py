"""A decoder in Hugging Face's layout: which tensor is which parameter, and of which family it is.

Names of tensors follow from what the decoder is built of; what its config.json calls things is `dialect`'s to say. A
decoder is of the first family that gives back what was written of it. Knows no file and no array.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.model.config import DecoderConfig
from experiments.model.dialects import FAMILIES, Dialect, Json, decoder_of
from experiments.model.moe import BALANCE
from runner.errors import InvalidError
from runner.huggingface.mapping import Family, TensorPiece

# Parameter -> tensor of a layer. Norms are named by their order, so the name depends on where norms are.
_OF_HEADS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
}
_OF_LATENTS = {
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_up": "self_attn.kv_b_proj",
}
_OF_QUERIES = {  # by whether they are made of a latent
    False: {"attention.query": "self_attn.q_proj"},
    True: {"attention.query_down": "self_attn.q_a_proj", "attention.query_up": "self_attn.q_b_proj"},
}
_OTHERS = {
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
# Of a layer with experts: where they are, and what an expert's matrices are called. Mixtral is the one without norms in
# its attention.
_EXPERTS = {
    False: ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    True: ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
_QUERY_KEY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
_QUERY_LATENT_NORM = {"attention.query_norm": "self_attn.q_a_layernorm"}
_KEY_VALUE_LATENT_NORM = {"attention.key_value_norm": "self_attn.kv_a_layernorm"}


class DecoderFiles(Family):
    """The weights of a decoder in Hugging Face's layout."""

    def __init__(self, config: DecoderConfig, vocabulary_size: int, sequence_length: int):
        self._config, self._vocabulary_size, self._sequence_length = config, vocabulary_size, sequence_length

    def pieces(self) -> Sequence[TensorPiece]:
        """Every parameter, and the tensor that it is."""
        found = [
            TensorPiece("model.embed_tokens.weight", "embedding"),
            TensorPiece("model.norm.weight", "final_norm.scale"),
        ]
        if not self._config.tied_embedding:
            found.append(TensorPiece("lm_head.weight", "head"))
        return [*found, *(piece for layer in range(self._config.layers) for piece in self._pieces_of(layer))]

    def config(self) -> Json:
        """The config.json of the family that this decoder is of. Raises `InvalidError` if it is of none."""
        if not self._families:
            nearest = min(FAMILIES, key=lambda name: len(self._misfits(self._written(FAMILIES[name]))))
            lines = "; ".join(self._misfits(self._written(FAMILIES[nearest])))
            raise InvalidError(f"config.model: no family of transformers is like it; nearest is {nearest}: {lines}")
        return self._written(FAMILIES[self._families[0]])

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """What the config.json of some weights says that this decoder is not, a line each, in the spec's words.

        What the tensors tell themselves, the vocabulary and whether there is a head, is left to them.
        """
        name, misfits = config.get("model_type"), self._misfits(config)
        if not misfits or name not in FAMILIES or name in self._families:
            return misfits
        return [f"model_type: got {name}, the model is of {' or '.join(self._families) or 'no such family'}", *misfits]

    def known_as(self, tensor: str) -> str | None:
        """Old files have the frequencies of rotary positions too, and some the embedding a second time, as the head."""
        is_repeated = tensor == "lm_head.weight" and self._config.tied_embedding
        return None if is_repeated or tensor.endswith(".rotary_emb.inv_freq") else tensor

    @functools.cached_property
    def _families(self) -> list[str]:
        """Those that give back what is written of this decoder."""
        return [name for name in FAMILIES if not self._misfits(self._written(FAMILIES[name]))]

    def _pieces_of(self, layer: int) -> Iterator[TensorPiece]:
        config, place = self._config, _place_of(self._config, layer)

        def piece(part: str, tensor: str, leaf: str, foreign: str) -> TensorPiece:
            is_kernel = leaf == "kernel"
            return TensorPiece(
                f"model.layers.{layer}.{tensor}.{foreign}", f"{place.prefix}.{part}.{leaf}", (place.turn,), is_kernel
            )

        for part, tensor in _matmuls(config).items():
            has_no_gate = part == "mlp.gate" and config.mlp == "squared_relu"
            if has_no_gate or (place.is_sparse and part.startswith("mlp.")):
                continue
            yield piece(part, tensor, "kernel", "weight")
            if _has_bias(config, part):
                yield piece(part, tensor, "bias", "bias")
        for part, tensor in (_NORMS[config.norm] | _attention_norms(config)).items():
            yield piece(part, tensor, "scale", "weight")
        if place.is_sparse:
            yield from self._pieces_of_experts(f"model.layers.{layer}", f"{place.prefix}.moe", place.turn)

    def _pieces_of_experts(self, tensors: str, leaves: str, turn: int) -> Iterator[TensorPiece]:
        moe, (block, names) = self._config.moe, _EXPERTS[bool(_attention_norms(self._config))]
        assert moe is not None, "a sparse layer has experts"
        yield TensorPiece(f"{tensors}.{block}.gate.weight", f"{leaves}.router", (turn,), transpose=True)
        if moe.bias_rate is not None:
            biases = f"variables.{BALANCE}.{leaves}.bias"
            yield TensorPiece(f"{tensors}.{block}.gate.e_score_correction_bias", biases, (turn,))
        for leaf, name in names.items():
            if leaf == "gate" and self._config.mlp == "squared_relu":
                continue
            for expert in range(moe.experts):
                tensor = f"{tensors}.{block}.experts.{expert}.{name}.weight"
                yield TensorPiece(tensor, f"{leaves}.{leaf}", (turn, expert), transpose=True)
            if moe.shared_experts:
                tensor = f"{tensors}.{block}.shared_experts.{name}.weight"
                yield TensorPiece(tensor, f"{leaves}.shared.{leaf}.kernel", (turn,), transpose=True)

    def _written(self, family: Dialect) -> Json:
        config = self._config
        common = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "vocab_size": self._vocabulary_size,
            "hidden_size": config.width,
            "intermediate_size": config.mlp_width,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.key_heads,
            "head_dim": config.head_size,
            "max_position_embeddings": self._sequence_length,
            "rms_norm_eps": config.norm_epsilon,
            "tie_word_embeddings": config.tied_embedding,
            "attention_dropout": 0.0,
            "use_cache": True,
            # What a family would fill in are ids of its own tokenizer.
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        return common | family.write(config)

    def _misfits(self, found: Mapping[str, Any]) -> list[str]:
        """How the decoder that a config.json describes differs from this one."""
        try:
            theirs = _told(decoder_of(found))
        except InvalidError as error:
            return [str(error)]
        ours = _told(self._config)
        return [
            f"{key}: got {_shown(theirs[key])}, the model needs {_shown(ours[key])}"
            for key in ours
            if ours[key] != theirs[key]
        ]


class _Place(NamedTuple):
    prefix: str  # of the layer's parameters
    turn: int  # which of the stacked ones
    is_sparse: bool


def _place_of(config: DecoderConfig, layer: int) -> _Place:
    for stage in config.stages:
        if layer < len(stage.kinds) * stage.repeats:
            turn, number = divmod(layer, len(stage.kinds))
            return _Place(f"{stage.name}.layer_{number}", turn, stage.is_sparse)
        layer -= len(stage.kinds) * stage.repeats
    raise AssertionError("the stages hold every layer")


def _matmuls(config: DecoderConfig) -> dict[str, str]:
    if config.latent is None:
        return _OF_HEADS | _OTHERS
    return _OF_QUERIES[config.latent.query_rank is not None] | _OF_LATENTS | _OTHERS


def _attention_norms(config: DecoderConfig) -> dict[str, str]:
    if config.latent is None:
        return _QUERY_KEY_NORMS if config.query_key_norm else {}
    return _KEY_VALUE_LATENT_NORM | (_QUERY_LATENT_NORM if config.latent.query_rank is not None else {})


def _has_bias(config: DecoderConfig, part: str) -> bool:
    if part.startswith("mlp."):
        return config.bias.mlp
    if config.latent is not None and not part.endswith(("_down", ".out")):
        return False
    return config.bias.attention_out if part == "attention.out" else config.bias.query_key_value


# What a decoder computes, in one form: two configs that compute the same are told alike.


def _told(config: DecoderConfig) -> Json:
    """All that the result depends on, with what is `auto` filled in."""
    kept = ("layers", "width", "heads", "mlp_width", "mlp", "norm", "norm_epsilon", "norm_offset", "query_key_norm")
    kinds = list(config.kinds)
    scale = 1 / math.sqrt(config.head_size) if config.query_scale == "auto" else config.query_scale
    embedding = math.sqrt(config.width) if config.embedding_scale == "sqrt_width" else config.embedding_scale
    return {key: getattr(config, key) for key in kept} | {
        "key_value_heads": config.key_heads,
        "head_dim": config.head_size,
        "latent": config.latent and config.latent.model_dump(),
        "bias": config.bias.model_dump(),
        "layer_pattern": kinds,
        "window": config.window,
        "rope": {kind: rope and rope.model_dump() for kind in sorted(set(kinds)) for rope in [config.rope_of(kind)]},
        "query_scale": float(f"{scale:.9g}"),
        "embedding_scale": float(f"{embedding:.9g}"),
        "attention_softcap": config.attention_softcap,
        "logit_softcap": config.logit_softcap,
        "logit_scale": float(f"{config.width_ratio:.9g}"),
        "moe": _moe_told(config),
    }


def _moe_told(config: DecoderConfig) -> Json | None:
    """What the result depends on of experts: not the losses that kept them in balance, but biases, which stay."""
    if config.moe is None:
        return None
    told = config.moe.model_dump(exclude={"auxiliary_loss", "router_z_loss", "bias_rate"})
    if config.moe.groups_per_token == config.moe.groups:  # whatever they are, a token's experts come from all of them
        told |= {"groups": 1, "groups_per_token": 1, "group_score": "max"}
    return told | {"expert_width": config.expert_width, "has_biases": config.moe.bias_rate is not None}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
