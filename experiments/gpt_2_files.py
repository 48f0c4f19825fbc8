"""GPT-2 in Hugging Face's files: the tensors of `GPT2LMHeadModel`, and its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.storage import JsonObject
from runner.weights.family import Family, Piece

_ALONE = {
    "transformer.wte.weight": "embedding",
    "transformer.wpe.weight": "positions",
    "transformer.ln_f.weight": "final_norm.scale",
    "transformer.ln_f.bias": "final_norm.bias",
}
_NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
_DENSE = {"attn.c_proj": "attention_out", "mlp.c_fc": "mlp_in", "mlp.c_proj": "mlp_out"}
_MASKS = (".attn.bias", ".attn.masked_bias")  # which older files hold beside the weights
# What moves no tensor's shape, and what a config.json that leaves it out means.
_DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_SAME = {"gelu_pytorch_tanh": "gelu_new"}


@dataclass(frozen=True)
class GPT2Files(Family):
    """Of one model: its sizes. Kernels are (in, out) in both, and query, key and value one tensor in the files."""

    layers: int
    heads: int
    width: int
    vocabulary_size: int
    positions: int
    dropout: float

    def pieces(self) -> list[Piece]:
        """See `Family`."""
        found = [Piece(tensor, leaf) for tensor, leaf in _ALONE.items()]
        for layer in range(self.layers):
            prefix, index = f"transformer.h.{layer}", (layer,)
            for tensor, leaf in _NORMS.items():
                found.append(Piece(f"{prefix}.{tensor}.weight", f"blocks.{leaf}.scale", index))
                found.append(Piece(f"{prefix}.{tensor}.bias", f"blocks.{leaf}.bias", index))
            for number, leaf in enumerate(("query", "key", "value")):
                start, stop = number * self.width, (number + 1) * self.width
                for name, kind, axis in (("weight", "kernel", 1), ("bias", "bias", 0)):
                    part = (axis, start, stop)
                    found.append(Piece(f"{prefix}.attn.c_attn.{name}", f"blocks.{leaf}.{kind}", index, part=part))
            for tensor, leaf in _DENSE.items():
                found.append(Piece(f"{prefix}.{tensor}.weight", f"blocks.{leaf}.kernel", index))
                found.append(Piece(f"{prefix}.{tensor}.bias", f"blocks.{leaf}.bias", index))
        return found

    def config(self) -> JsonObject:
        """See `Family`. No token begins or ends a text, as far as the model knows."""
        sizes = {"n_layer": self.layers, "n_head": self.heads, "n_embd": self.width, "n_positions": self.positions}
        dropped = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), self.dropout) | {"attn_pdrop": 0.0}
        ends = {"bos_token_id": None, "eos_token_id": None}
        named = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        return {**named, "vocab_size": self.vocabulary_size, **sizes, **_DEFAULTS, **dropped, **ends}

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """See `Family`."""
        needed = {"model_type": "gpt2", "n_head": self.heads, **_DEFAULTS}
        found = {key: config.get(key, _DEFAULTS.get(key)) for key in needed}
        return [
            f"{key}: got {found[key]!r}, the model needs {value!r}"
            for key, value in needed.items()
            if _SAME.get(str(found[key]), found[key]) != value
        ]

    def known_as(self, tensor: str) -> str | None:
        """See `Family`. The files of OpenAI's release leave `transformer.` out; the head is the embedding again."""
        if tensor.endswith(_MASKS) or tensor == "lm_head.weight":
            return None
        return tensor if tensor.startswith("transformer.") else f"transformer.{tensor}"
