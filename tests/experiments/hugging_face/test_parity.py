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

from experiments.model.config_json import FAMILIES, parse_config_json
from experiments.model.decoder import Decoder
from experiments.model.huggingface import DecoderFiles
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


SOAK_CASES = ("mistral", "qwen3", "smollm3", "olmoe", "olmo3", "qwen3_5", "qwen3_5_moe")  # others cover their parts


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


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_model_is_imported(prefix, tmp_path):
    text = json.loads((FIXTURES / "gemma3" / "config.json").read_text())
    tensors = load_file(FIXTURES / "gemma3" / "model.safetensors")
    images = {f"vision_tower.{name}": np.zeros(2, np.float32) for name in "abc"}
    nested = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()} | images
    save_file(nested, tmp_path / "model.safetensors")
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
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
