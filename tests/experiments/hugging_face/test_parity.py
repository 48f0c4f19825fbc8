"""Parity of decoders with transformers: daily on fixtures that it wrote, in the soak tests on live models.

Shape legend: B batch, T sequence, V vocabulary.
"""

import importlib
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.model.config import DecoderConfig
from experiments.model.config_json import FAMILIES, parse_config_json
from experiments.model.decoder import Decoder
from experiments.model.huggingface import DecoderFiles
from experiments.model.presets import PRESETS
from runner.checkpoint.leaves import flatten_with_names
from runner.errors import InvalidError
from runner.huggingface.mapping import match_tensors
from runner.huggingface.safetensors import open_published_weights
from runner.spec import InitFromConfig
from tests.experiments.hugging_face.cases import CASES, DAILY

FIXTURES = Path(__file__).parent / "fixtures"
TOKENS_BxT = np.random.default_rng(1).integers(0, 64, (2, 24))


def parse_config(config, sequence_length=64):
    return DecoderFiles(config, 64, sequence_length)


def stack_params(tensors, files):
    """Stack tensors into parameters, and check that each tensor is used."""
    slices = {}
    left = set(tensors)
    for piece in files.pieces():
        left.discard(piece.tensor)
        tensor = tensors[piece.tensor]
        if piece.part is not None:
            axis, start, stop = piece.part
            tensor = tensor[(*[slice(None)] * axis, slice(start, stop, piece.step))]
        slices.setdefault(piece.leaf, {})[piece.index] = np.swapaxes(tensor, -1, -2) if piece.transpose else tensor
    assert left == set()
    params = {}
    for leaf, found in slices.items():
        *parents, name = leaf.split(".")
        section = params
        for parent in parents:
            section = section.setdefault(parent, {})
        places = sorted(found)
        stacked = np.stack([found[place] for place in places])
        section[name] = stacked.reshape(*(last + 1 for last in places[-1]), *stacked.shape[1:])
    return params


def compute_logits(config, params):
    model = Decoder(config, 64)
    variables = {"params": params} | params.pop("variables", {})
    return np.asarray(jax.jit(lambda variables: model.apply(variables, TOKENS_BxT, deterministic=True))(variables))


def assert_same_logits(actual_BxTxV, expected_BxTxV):
    np.testing.assert_allclose(actual_BxTxV, expected_BxTxV, atol=1e-4, rtol=0)
    assert (actual_BxTxV.argmax(-1) == expected_BxTxV.argmax(-1)).mean() >= 0.999


def test_every_family_has_a_fixture():
    assert {CASES[name][0] for name in DAILY} == set(FAMILIES)


# Others cover their parts.
SOAK_CASES = ("mistral", "qwen2", "qwen3", "gemma3", "smollm3", "olmo3", "mixtral", "olmoe", "qwen3_moe")
SOAK_CASES += ("deepseek_v2", "qwen3_5", "qwen3_5_moe")


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SOAK_CASES else name for name in DAILY]
)
def test_logits_of_each_family_match_transformers(name):
    config = parse_config_json(json.loads((FIXTURES / name / "config.json").read_text()))
    params = stack_params(load_file(FIXTURES / name / "model.safetensors"), parse_config(config))
    assert_same_logits(compute_logits(config, params), np.load(FIXTURES / name / "logits.npy"))


@pytest.mark.parametrize("name", DAILY)
def test_an_exported_config_describes_the_same_decoder(name):
    found = json.loads((FIXTURES / name / "config.json").read_text())
    files = parse_config(parse_config_json(found))
    written = files.config()
    assert (written["model_type"], written["architectures"]) == (found["model_type"], found["architectures"])
    assert files.differences(found) == files.differences(written) == []


@pytest.mark.parametrize(
    ("name", "number", "places"),
    [
        ("deepseek_v3", 2, {"model.layers.3", "model.layers.4"}),
        ("qwen3_next", 1, {"mtp"}),
        ("qwen3_next", 2, {""}),
        ("llama", 2, {""}),
    ],
)
def test_files_hold_extra_predictions_where_the_family_has_them(name, number, places):
    without = parse_config_json(json.loads((FIXTURES / name / "config.json").read_text()))
    files = parse_config(without.model_copy(update={"extra_predictions": number}))
    extra = [piece for piece in files.pieces() if piece.leaf.startswith(("extra.", "variables.balance.extra."))]
    names = {piece.tensor for piece in extra}
    assert {tensor if tensor == "" else re.match(r"mtp|model\.layers\.\d+", tensor)[0] for tensor in names} == places
    assert {piece.index[0] for piece in extra} == {*range(number)}
    if places == {""}:
        assert files.copies() == {}
        assert files.config() == parse_config(without).config()
        return
    assert all(files.known_as(tensor) == tensor for tensor in names)
    assert {parse_config(without).known_as(tensor) for tensor in names} == {None}
    if name == "deepseek_v3":
        assert files.config()["num_nextn_predict_layers"] == 2
        assert files.copies()["model.layers.3.shared_head.head.weight"] == "lm_head.weight"
    assert all(files.known_as(copy) is None for copy in files.copies())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_next", {"mlp": "geglu"}),
        ("qwen3_5", {"mlp": "geglu"}),
        ("qwen3_5_moe", {"moe": {"normalise_gates": False}}),
        ("qwen3_5_moe", {"moe": {"dense_layers": 1}}),
    ],
)
def test_a_hybrid_that_transformers_would_compute_otherwise_is_not_exported(name, changes):
    config = parse_config_json(json.loads((FIXTURES / name / "config.json").read_text()))
    moe = changes.get("moe")
    update = changes if moe is None else {"moe": config.moe.model_copy(update=moe)}
    assert parse_config(config).config()["model_type"].startswith(name)
    with pytest.raises(InvalidError, match="no family of transformers has this model"):
        parse_config(config.model_copy(update=update)).config()


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("gemma3", "language_model.model."),
        ("gemma3", "model.language_model."),
        ("gemma4", "model.language_model."),
    ],
)
def test_the_text_part_of_a_multimodal_model_is_imported(name, prefix, tmp_path):
    text = json.loads((FIXTURES / name / "config.json").read_text())
    tensors = load_file(FIXTURES / name / "model.safetensors")
    others = [f"vision_tower.{part}" for part in "abc"]
    if name == "gemma4":
        # Published files have keys and values of the last layers too, which no layer reads.
        others += [f"{prefix}layers.5.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")]
    nested = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    nested |= {name: np.zeros(2, np.float32) for name in others}
    save_file(nested, tmp_path / "model.safetensors")
    config = {"model_type": name, "text_config": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    files = parse_config(parse_config_json(config))
    assert files.differences(config) == []
    leaves = flatten_with_names({"params": stack_params(tensors, files)})
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    rule = InitFromConfig(path=str(tmp_path))
    match = match_tensors(open_published_weights(str(tmp_path)), files, shapes, rule)
    assert all(tensor is not None for pieces in match.pieces.values() for _, tensor in pieces)
    assert match.notes == ("vision_tower: its 3 tensors are left out, the model has no such part",)


def test_omitted_keys_of_gemma3_have_their_defaults():
    # The text_config of gemma-3-4b-it.
    text = {
        **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34},
        **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    }
    config = parse_config_json({"model_type": "gemma3", "text_config": text})
    assert (config.heads, config.key_heads, config.head_size, config.window) == (8, 4, 256, 1024)
    assert config.layer_kinds[4:7] == ["window", "full", "window"]
    assert config.tied_embedding


GEMMA4_PATTERN = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA4_ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
# The text_config of each published model, as transformers before 5.2 wrote it; what is left out has its default.
GEMMA4 = {
    "e2b": {
        **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1},
        **{"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_kv_shared_layers": 20},
        **{"use_double_wide_mlp": True, "num_global_key_value_heads": None, "enable_moe_block": False},
    },
    "e4b": {
        **{"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42, "num_key_value_heads": 2},
        **{"layer_types": GEMMA4_PATTERN * 7, "num_kv_shared_layers": 18, "use_double_wide_mlp": False},
    },
    "31b": {
        **{"hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 60, "num_key_value_heads": 16},
        **{"layer_types": GEMMA4_PATTERN * 10, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
        **{"num_attention_heads": 32, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
    },
    "26b_a4b": {
        **{"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_key_value_heads": 8},
        **{"layer_types": GEMMA4_PATTERN * 5, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
        **{"num_attention_heads": 16, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    },
}


@pytest.mark.parametrize("name", [name for name in GEMMA4 if f"gemma4_{name}" in PRESETS])
def test_published_files_of_gemma4_describe_the_presets(name):
    text = {"model_type": "gemma4_text", "final_logit_softcapping": 30.0, "rope_parameters": GEMMA4_ROPES}
    text |= {"use_bidirectional_attention": "vision"} | GEMMA4[name]
    config = DecoderConfig(preset=f"gemma4_{name}")
    assert DecoderFiles(config, 262_144, 64).differences({"model_type": "gemma4", "text_config": text}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: all is not supported"),
        ({"vocab_size_per_layer_input": 60}, "vocab_size_per_layer_input: 60 is not supported; needs vocab_size, 64"),
        ({"per_layer_config": {"1": {"head_dim": 12}}}, "per_layer_config: full layers must be alike"),
        ({"per_layer_config": {"0": {"head_dim": 12}}}, "per_layer_config: full layers must be alike"),
        ({"per_layer_config": {"1": {"sliding_window": 9}}}, "per_layer_config: full layers must be alike"),
        ({"num_kv_shared_layers": 5}, "key_value_sharing.layers=5 leaves none of layers=6 of the kind full"),
        ({"num_kv_shared_layers": "two"}, "key_value_sharing.layers: Input should be a valid integer"),
        ({"hidden_size_per_layer_input": -1}, "layer_embedding_width: Input should be greater than 0"),
        ({"enable_moe_block": True}, "moe.experts: Input should be a valid integer"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope: dynamic scaling is not supported"),
        ({"rope_parameters": [1]}, "a value has the wrong type, or contradicts another one"),
        ({"hidden_activation": "relu"}, "mlp: activation relu is not supported"),
    ],
)
def test_a_file_of_gemma4_that_the_decoder_cannot_be_is_refused_by_its_key(changes, message):
    found = json.loads((FIXTURES / "gemma4" / "config.json").read_text())
    with pytest.raises(InvalidError, match=re.escape(message)) as error:
        parse_config_json(found | changes)
    assert "\n" not in str(error.value)


@pytest.mark.soak
def test_a_live_multimodal_model_is_imported(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs pip install -e '.[parity]'")
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision | {"num_attention_heads": 2})
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    files = parse_config(parse_config_json(found))
    named = {files.known_as(name): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    del named[None]
    logits_BxTxV = compute_logits(parse_config_json(found), stack_params(named, files))
    write = importlib.import_module("tests.experiments.hugging_face.write")
    assert_same_logits(logits_BxTxV, write.compute_logits(model, TOKENS_BxT))


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_logits_match_live_transformers_in_both_directions(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs pip install -e '.[parity]'")
    write = importlib.import_module("tests.experiments.hugging_face.write")
    model = write.make_model(name)
    expected_BxTxV = write.compute_logits(model, TOKENS_BxT)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    found = model.config.to_dict()
    files = parse_config(parse_config_json(found))
    assert_same_logits(compute_logits(parse_config_json(found), stack_params(tensors, files)), expected_BxTxV)

    written = transformers.AutoConfig.for_model(**files.config(), attn_implementation="eager")
    again = transformers.AutoModelForCausalLM.from_config(written).float().eval()
    again.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(write.compute_logits(again, TOKENS_BxT), expected_BxTxV)
