"""Decoders compute what transformers computes: on fixtures written by it, and in the soak on live models.

Shape legend: B batch, T sequence, V vocabulary.
"""

import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.model.config_json import FAMILIES, parse_config_json
from experiments.model.decoder import Decoder
from experiments.model.huggingface import DecoderFiles
from tests.experiments.hugging_face.cases import CASES, DAILY

FIXTURES = Path(__file__).parent / "fixtures"
TOKENS_BxT = np.random.default_rng(1).integers(0, 64, (2, 24))


def files_of(config, sequence_length=64):
    return DecoderFiles(config, 64, sequence_length)


def params_from(tensors, files):
    """Return the parameters stacked from these tensors, each of which is used once."""
    slices = {}
    left = dict(tensors)
    for piece in files.pieces():
        tensor = left.pop(piece.tensor)
        slices.setdefault(piece.leaf, {})[piece.index] = tensor.T if piece.transpose else tensor
    assert left == {}
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


def our_logits(config, params):
    model = Decoder(config, 64)
    variables = {"params": params} | params.pop("variables", {})
    return np.asarray(jax.jit(lambda variables: model.apply(variables, TOKENS_BxT, deterministic=True))(variables))


def assert_same_logits(actual_BxTxV, expected_BxTxV):
    np.testing.assert_allclose(actual_BxTxV, expected_BxTxV, atol=1e-4, rtol=0)
    assert (actual_BxTxV.argmax(-1) == expected_BxTxV.argmax(-1)).mean() >= 0.999


def test_every_family_has_a_fixture():
    assert {CASES[name][0] for name in DAILY} == set(FAMILIES)


SPARED = ("mistral", "qwen3", "smollm3", "olmoe")  # other families cover each of their parts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SPARED else name for name in DAILY]
)
def test_logits_of_each_family_match_those_of_transformers(name):
    config = parse_config_json(json.loads((FIXTURES / name / "config.json").read_text()))
    params = params_from(load_file(FIXTURES / name / "model.safetensors"), files_of(config))
    assert_same_logits(our_logits(config, params), np.load(FIXTURES / name / "logits.npy"))


@pytest.mark.parametrize("name", DAILY)
def test_a_written_config_describes_the_same_decoder(name):
    found = json.loads((FIXTURES / name / "config.json").read_text())
    files = files_of(parse_config_json(found))
    written = files.config()
    assert (written["model_type"], written["architectures"]) == (found["model_type"], found["architectures"])
    assert files.differences(found) == files.differences(written) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_logits_match_live_transformers_in_both_directions(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs pip install 'runner[parity]'")
    write = importlib.import_module("tests.experiments.hugging_face.write")
    model = write.make(name)
    expected_BxTxV = write.logits_of(model, TOKENS_BxT)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    found = model.config.to_dict()
    files = files_of(parse_config_json(found))
    assert_same_logits(our_logits(parse_config_json(found), params_from(tensors, files)), expected_BxTxV)

    written = transformers.AutoConfig.for_model(**files.config(), attn_implementation="eager")
    again = transformers.AutoModelForCausalLM.from_config(written).float().eval()
    again.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(write.logits_of(again, TOKENS_BxT), expected_BxTxV)
