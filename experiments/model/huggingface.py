"""A decoder in Hugging Face's layout: the tensor of each parameter, and the families that the decoder belongs to.

Names of tensors follow from the parts of the decoder; `config_json` knows the keys of each family's config.json. A
decoder belongs to a family if reading what is written of it gives the same decoder; it is written as the first such
family.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.model.config import DecoderConfig, LayerKind, Stage
from experiments.model.config_json import FAMILIES, ConfigFormat, ExtraFiles, Json, find_text_config, parse_config_json
from experiments.model.moe import BALANCE
from runner.errors import InvalidError
from runner.huggingface.mapping import Family, TensorPiece

# Names of modules in a layer: parameter -> tensor.
_HEAD_MATMULS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
}
_LATENT_MATMULS = {
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_up": "self_attn.kv_b_proj",
}
_LATENT_QUERY_MATMULS = {  # by whether queries have a latent
    False: {"attention.query": "self_attn.q_proj"},
    True: {"attention.query_down": "self_attn.q_a_proj", "attention.query_up": "self_attn.q_b_proj"},
}
_OUT_MATMUL = {"attention.out": "self_attn.o_proj"}
_MLP_MATMULS = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}
# Hugging Face names norms by their order, so one name means different norms in different arrangements.
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
_QUERY_KEY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
_QUERY_LATENT_NORM = {"attention.query_norm": "self_attn.q_a_layernorm"}
_KEY_VALUE_LATENT_NORM = {"attention.key_value_norm": "self_attn.kv_a_layernorm"}
# Layers of extra predictions have these beside the parts of a layer, where {} stands for the layer.
_EXTRA_FILES = {
    "layers": {
        "embedding_norm.scale": "{}.enorm.weight",
        "input_norm.scale": "{}.hnorm.weight",
        "projection.kernel": "{}.eh_proj.weight",
        "output_norm.scale": "{}.shared_head.norm.weight",
    },
    "mtp": {
        "embedding_norm.scale": "mtp.pre_fc_norm_embedding.weight",
        "input_norm.scale": "mtp.pre_fc_norm_hidden.weight",
        "projection.kernel": "mtp.fc.weight",
        "output_norm.scale": "mtp.norm.weight",
    },
}
# Module of the experts, and names of an expert's matrices, by whether attention has norms or experts have biases.
# Mixtral is the only family with experts that has neither.
_EXPERTS = {
    False: ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    True: ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
# Parts of a linear layer. The convolution is one tensor, and so may projections be, which our leaves share.
_LINEAR_MATMULS = {
    "fused": {"qkvz": "in_proj_qkvz", "ba": "in_proj_ba"},
    "separate": {"gate": "in_proj_z", "beta": "in_proj_b", "decay": "in_proj_a"},
}
_LINEAR_VECTORS = {"a_log": "A_log", "dt_bias": "dt_bias", "norm.scale": "norm.weight"}
# Experts with biases, as in GPT-OSS: one tensor for all experts of a layer, and one for gate and up, which take turns
# on its last axis. Leaf -> tensor, and the first element of the leaf.
_STACKED_EXPERTS = {
    "gate": ("gate_up_proj", 0),
    "up": ("gate_up_proj", 1),
    "down": ("down_proj", None),
    "gate_bias": ("gate_up_proj_bias", 0),
    "up_bias": ("gate_up_proj_bias", 1),
    "down_bias": ("down_proj_bias", None),
}
# Embeddings of layers, and the parts of a layer that read them: leaf -> tensor, and whether it is transposed.
_LAYER_EMBEDDINGS = {
    "layer_embeddings.embedding": ("model.embed_tokens_per_layer", False),
    "layer_embeddings.projection.kernel": ("model.per_layer_model_projection", True),
    "layer_embeddings.norm.scale": ("model.per_layer_projection_norm", False),
}
_LAYER_EMBEDDING = {
    "embedding_gate.kernel": ("per_layer_input_gate", True),
    "embedding_out.kernel": ("per_layer_projection", True),
    "embedding_post_norm.scale": ("post_per_layer_input_norm", False),
}
_BESIDE_MLP_NORMS = {  # of layers that have experts beside an MLP, as in Gemma 4
    "mlp_own_norm": "post_feedforward_layernorm_1",
    "moe_norm": "pre_feedforward_layernorm_2",
    "moe_post_norm": "post_feedforward_layernorm_2",
}
_KEY_VALUE_PARTS = ("k_proj", "v_proj", "k_norm", "v_norm")
# Names in models that also read images or hear: prefixes of the decoder, and the parts for these.
_TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}
_IMAGE_PARTS = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector", "visual", "embed_vision", "audio_tower", "embed_audio")
)


class DecoderFiles(Family):
    """Weights and config.json of a decoder in Hugging Face's layout."""

    def __init__(self, config: DecoderConfig, vocabulary_size: int, sequence_length: int):
        self._config, self._vocabulary_size, self._sequence_length = config, vocabulary_size, sequence_length

    def pieces(self) -> Sequence[TensorPiece]:
        """Return every parameter with its tensor."""
        pieces = [
            TensorPiece("model.embed_tokens.weight", "embedding"),
            TensorPiece("model.norm.weight", "final_norm.scale"),
        ]
        if not self._config.tied_embedding:
            pieces.append(TensorPiece("lm_head.weight", "head"))
        if self._config.layer_embedding_width is not None:
            for leaf, (tensor, is_matrix) in _LAYER_EMBEDDINGS.items():
                pieces.append(TensorPiece(f"{tensor}.weight", leaf, transpose=is_matrix))
        layer = 0
        for stage in self._config.stages:
            for repeat in range(stage.repeats):
                for number, kind in enumerate(stage.kinds):
                    module = f"{stage.name}.layer_{number}"
                    pieces += self._list_layer_pieces(f"model.layers.{layer}", module, repeat, kind, stage)
                    layer += 1
        stage, form = self._config.extra_stage, self._extra_files
        for repeat in range(stage.repeats):
            names = _EXTRA_FILES[form or "layers"]
            tensors = "mtp.layers.0" if form == "mtp" else f"model.layers.{layer + repeat}"
            extra = self._list_layer_pieces(tensors, f"{stage.name}.layer_0", repeat, stage.kinds[0], stage)
            extra += [
                TensorPiece(tensor.format(tensors), f"{stage.name}.{part}", (repeat,), part.endswith("kernel"))
                for part, tensor in names.items()
            ]
            pieces += [piece if form else replace(piece, tensor="") for piece in extra]
        return pieces

    def copies(self) -> Mapping[str, str]:
        """Return the embedding and the head, which extra predictions share, as files repeat them in each such layer."""
        if not self._config.extra_predictions or self._extra_files != "layers":
            return {}
        head = "model.embed_tokens.weight" if self._config.tied_embedding else "lm_head.weight"
        shared = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": head}
        layers = range(self._config.layers, self._config.num_trained_layers)
        return {f"model.layers.{layer}.{name}": tensor for layer in layers for name, tensor in shared.items()}

    def config(self) -> Json:
        """Return the config.json of the decoder's family.

        Raises:
            InvalidError: no family of transformers has such a decoder; the message names the nearest one.
        """
        if not self._families:
            nearest = min(FAMILIES, key=lambda name: len(self._compare(self._make_config_json(FAMILIES[name]))))
            lines = "; ".join(self._compare(self._make_config_json(FAMILIES[nearest])))
            raise InvalidError(f"config.model: no family of transformers has this model; nearest is {nearest}: {lines}")
        return self._make_config_json(FAMILIES[self._families[0]])

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """Return how the config.json of given weights differs from this decoder, one line each, in keys of the spec.

        The vocabulary and the presence of a head are left to the tensors, which show them.
        """
        content = dict(config)
        name, differences = find_text_config(content).get("model_type"), self._compare(content, is_own=False)
        if not differences or name not in FAMILIES or name in self._families:
            return differences
        families = " or ".join(self._families) or "no such family"
        return [f"model_type: got {name}, the model is of {families}", *differences]

    def known_as(self, tensor: str) -> str | None:
        """Return the tensor's name in `pieces`, or None to skip it.

        Layers of extra predictions are skipped if the decoder has none. Old files also contain the frequencies of
        rotary positions, and some a second copy of the embedding as the head. Models that also read images have further
        parts, which are skipped, and prefix the names of the decoder.
        """
        if tensor.startswith(_IMAGE_PARTS):
            return None
        prefix = next((each for each in _TEXT_PREFIXES if tensor.startswith(each)), "")
        tensor = _TEXT_PREFIXES.get(prefix, "") + tensor.removeprefix(prefix)
        is_repeated = (tensor == "lm_head.weight" and self._config.tied_embedding) or tensor in self.copies()
        layer = re.match(r"model\.layers\.(\d+)\.", tensor)
        # Only files of such families have these layers after those of the decoder; elsewhere they are left over.
        is_extra = tensor.startswith("mtp.") or (
            self._extra_files == "layers" and layer is not None and int(layer[1]) >= self._config.layers
        )
        if is_extra and not (self._config.extra_predictions and self._extra_files):
            return None  # decoding one token at a time does not need them
        # Published files also have the keys and values that no layer reads.
        sharing, part = self._config.key_value_sharing, tensor.split(".self_attn.")[-1].partition(".")[0]
        takes = sharing is not None and layer is not None and int(layer[1]) >= self._config.layers - sharing.layers
        if takes and part in _KEY_VALUE_PARTS:
            return None
        return None if is_repeated or tensor.endswith(".rotary_emb.inv_freq") else tensor

    @functools.cached_property
    def _extra_files(self) -> ExtraFiles:
        """Form in which files of the decoder's family hold its layers of extra predictions; "" if they do not."""
        form = FAMILIES[self._families[0]].extra_files if self._families else ""
        return "" if form == "mtp" and self._config.extra_predictions > 1 else form

    @functools.cached_property
    def _families(self) -> list[str]:
        """Families that give the same decoder back when what is written of it is read."""
        return [name for name in FAMILIES if not self._compare(self._make_config_json(FAMILIES[name]))]

    def _list_layer_pieces(
        self, tensors: str, leaves: str, index: int, kind: LayerKind, stage: Stage
    ) -> list[TensorPiece]:
        """Return the pieces of one layer, at `index` of stacked parameters; `tensors` and `leaves` are prefixes."""
        config, has_gate, is_sparse = self._config, self._config.mlp != "squared_relu", stage.is_sparse
        has_mlp = not is_sparse or (config.moe is not None and config.moe.beside_mlp)
        attention_norms: dict[str, str] = {}
        pieces = []
        if kind == "linear":
            matmuls = _MLP_MATMULS
            linear, theirs, ours = config.linear, f"{tensors}.linear_attn", f"{leaves}.delta_net"
            assert linear is not None, "a linear layer needs config.model.linear"
            for part, tensor in (_LINEAR_MATMULS[linear.projections] | {"out": "out_proj"}).items():
                pieces.append(TensorPiece(f"{theirs}.{tensor}.weight", f"{ours}.{part}.kernel", (index,), True))
            for part, tensor in _LINEAR_VECTORS.items():
                pieces.append(TensorPiece(f"{theirs}.{tensor}", f"{ours}.{part}", (index,)))
            stop = 0
            for part, width in (("query", linear.key_width), ("key", linear.key_width), ("value", linear.value_width)):
                place, stop = (0, stop, stop + width), stop + width
                pieces.append(TensorPiece(f"{theirs}.conv1d.weight", f"{ours}.{part}_conv", (index,), part=place))
                if linear.projections == "separate":
                    tensor = f"{theirs}.in_proj_qkv.weight"
                    pieces.append(TensorPiece(tensor, f"{ours}.{part}.kernel", (index,), True, place))
        elif config.latent is None:
            matmuls = _HEAD_MATMULS | _OUT_MATMUL | _MLP_MATMULS
            attention_norms = _QUERY_KEY_NORMS if config.query_key_norm else {}
        else:
            has_query_latent = config.latent.query_rank is not None
            matmuls = _LATENT_QUERY_MATMULS[has_query_latent] | _LATENT_MATMULS | _OUT_MATMUL | _MLP_MATMULS
            attention_norms = _KEY_VALUE_LATENT_NORM | (_QUERY_LATENT_NORM if has_query_latent else {})
        for part, tensor in matmuls.items():
            if (part == "mlp.gate" and not has_gate) or (part.startswith("mlp.") and not has_mlp):
                continue
            if part == "attention.value" and config.has_keys_as_values(kind):
                continue
            if stage.sharing == "takes" and part in ("attention.key", "attention.value"):
                continue
            pieces.append(TensorPiece(f"{tensors}.{tensor}.weight", f"{leaves}.{part}.kernel", (index,), True))
            has_bias = config.bias.attention_out if part == "attention.out" else config.bias.query_key_value
            if part.startswith("mlp."):
                has_bias = config.bias.mlp
            elif config.latent is not None and not part.endswith(("_down", ".out")):
                has_bias = False
            if has_bias:
                pieces.append(TensorPiece(f"{tensors}.{tensor}.bias", f"{leaves}.{part}.bias", (index,)))
        if config.attention_sinks and kind != "linear":
            pieces.append(TensorPiece(f"{tensors}.self_attn.sinks", f"{leaves}.attention.sinks", (index,)))
        if stage.sharing == "takes":
            attention_norms = {part: tensor for part, tensor in attention_norms.items() if part != "attention.key_norm"}
        for part, tensor in (_NORMS[config.norm] | attention_norms).items():
            pieces.append(TensorPiece(f"{tensors}.{tensor}.weight", f"{leaves}.{part}.scale", (index,)))
        if config.layer_embedding_width is not None:
            for part, (tensor, is_matrix) in _LAYER_EMBEDDING.items():
                pieces.append(TensorPiece(f"{tensors}.{tensor}.weight", f"{leaves}.{part}", (index,), is_matrix))
        if config.layer_scale:
            pieces.append(TensorPiece(f"{tensors}.layer_scalar", f"{leaves}.layer_scale", (index,)))
        if not is_sparse:
            return pieces

        moe = config.moe
        assert moe is not None, "a sparse layer has experts"
        if moe.beside_mlp:
            for part, tensor in _BESIDE_MLP_NORMS.items():
                pieces.append(TensorPiece(f"{tensors}.{tensor}.weight", f"{leaves}.{part}.scale", (index,)))
            pieces.append(TensorPiece(f"{tensors}.router.scale", f"{leaves}.router_norm.scale", (index,)))
            pieces.append(TensorPiece(f"{tensors}.router.per_expert_scale", f"{leaves}.moe.expert_scale", (index,)))
            pieces.append(TensorPiece(f"{tensors}.router.proj.weight", f"{leaves}.moe.router", (index,), True))
            tensors, leaves, width = f"{tensors}.experts", f"{leaves}.moe", config.expert_width
            pieces.append(TensorPiece(f"{tensors}.gate_up_proj", f"{leaves}.gate", (index,), True, (1, 0, width)))
            pieces.append(TensorPiece(f"{tensors}.gate_up_proj", f"{leaves}.up", (index,), True, (1, width, 2 * width)))
            pieces.append(TensorPiece(f"{tensors}.down_proj", f"{leaves}.down", (index,), True))
            return pieces
        block, names = _EXPERTS[moe.bias or config.latent is not None or config.query_key_norm is not None]
        shared = "shared_expert" if moe.shared_gate else "shared_experts"
        router, tensors, leaves = "router" if moe.bias else "gate", f"{tensors}.{block}", f"{leaves}.moe"
        pieces.append(TensorPiece(f"{tensors}.{router}.weight", f"{leaves}.router", (index,), transpose=True))
        if moe.bias:
            pieces.append(TensorPiece(f"{tensors}.{router}.bias", f"{leaves}.router_bias", (index,)))
            for leaf, (name, first) in _STACKED_EXPERTS.items():
                axis, step = 1 if leaf.endswith("_bias") else 2, 1 if first is None else 2
                turn = None if first is None else (axis, first, 2 * config.expert_width)
                tensor = f"{tensors}.experts.{name}"
                pieces.append(TensorPiece(tensor, f"{leaves}.{leaf}", (index,), part=turn, step=step))
        if moe.bias_rate is not None:
            biases = f"variables.{BALANCE}.{leaves}.bias"
            pieces.append(TensorPiece(f"{tensors}.{router}.e_score_correction_bias", biases, (index,)))
        for leaf, name in names.items():
            if leaf == "gate" and not has_gate:
                continue
            for expert in range(0 if moe.bias else moe.experts):
                tensor = f"{tensors}.experts.{expert}.{name}.weight"
                pieces.append(TensorPiece(tensor, f"{leaves}.{leaf}", (index, expert), transpose=True))
            if moe.shared_experts:
                tensor = f"{tensors}.{shared}.{name}.weight"
                pieces.append(TensorPiece(tensor, f"{leaves}.shared.{leaf}.kernel", (index,), transpose=True))
        if moe.shared_gate:
            gate = f"{tensors}.shared_expert_gate.weight"
            pieces.append(TensorPiece(gate, f"{leaves}.shared_gate", (index,), transpose=True))
        return pieces

    def _make_config_json(self, family: ConfigFormat) -> Json:
        """Return the config.json of this decoder as a member of `family`, whether or not it belongs there."""
        config = self._config
        return {
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
            **({} if config.layer_embedding_width is None else {"vocab_size_per_layer_input": self._vocabulary_size}),
            # Without these keys a family would fill in the ids of its own tokenizer.
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        } | family.write(config)

    def _compare(self, config: Json, *, is_own: bool = True) -> list[str]:
        """Return how the decoder of a config.json, by default one written here, differs from this one."""
        try:
            theirs = _canonicalise(parse_config_json(config, is_own=is_own))
        except InvalidError as error:
            return [str(error)]
        ours = _canonicalise(self._config)
        return [
            f"{key}: got {_format(theirs[key])}, the model needs {_format(ours[key])}"
            for key in ours
            if ours[key] != theirs[key]
        ]


def _canonicalise(config: DecoderConfig) -> Json:
    """Return everything that the result depends on, with `auto` resolved: equal for configs that compute the same."""
    same = ["layers", "width", "heads", "mlp_width", "mlp", "norm", "norm_epsilon", "norm_offset", "query_key_norm"]
    same += ["attention_gate", "value_norm", "layer_embedding_width", "layer_scale"]
    kinds = config.layer_kinds
    scale = 1 / math.sqrt(config.head_size) if config.query_scale == "auto" else config.query_scale
    embedding = math.sqrt(config.width) if config.embedding_scale == "sqrt_width" else config.embedding_scale
    experts: Json | None = None
    if config.moe is not None:
        # Losses and the rate of biases matter in training only; whether there are biases matters always.
        experts = config.moe.model_dump(exclude={"auxiliary_loss", "router_z_loss", "bias_rate"})
        if config.moe.groups_per_token == config.moe.groups:  # a token's experts come from all groups, however many
            experts |= {"groups": 1, "groups_per_token": 1, "group_score": "max"}
        experts |= {"expert_width": config.expert_width, "shared_width": config.shared_width}
        experts |= {"has_biases": config.moe.bias_rate is not None}
    return {key: getattr(config, key) for key in same} | {
        "key_value_heads": config.key_heads,
        "head_dim": config.head_size,
        "full_heads": "full" in kinds
        and [config.get_head_size("full"), config.get_key_heads("full"), config.has_keys_as_values("full")],
        "key_value_sharing": config.key_value_sharing
        and [config.key_value_sharing.layers, config.get_mlp_width("takes")],
        "latent": config.latent and config.latent.model_dump(),
        "linear": config.linear and config.linear.model_dump(),
        "bias": config.bias.model_dump(),
        "layer_pattern": kinds,
        "window": config.window,
        "rope": {
            kind: rope and rope.resolve().model_dump()
            for kind in sorted(set(kinds))
            for rope in [config.get_rope(kind)]
        },
        "query_scale": float(f"{scale:.9g}"),
        "embedding_scale": float(f"{embedding:.9g}"),
        "attention_softcap": config.attention_softcap,
        "attention_sinks": config.attention_sinks,
        "logit_softcap": config.logit_softcap,
        "logit_scale": float(f"{config.width_ratio:.9g}"),
        "moe": experts,
    }


def _format(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
