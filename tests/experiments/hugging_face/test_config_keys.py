"""Keys of config.json: those that a family does not know are refused unless ignored, all others are accepted."""

import json
import re
from typing import Any

import pytest

from experiments.gpt import PretrainGPT
from experiments.model.config import DecoderConfig
from experiments.model.config_json import COMMON_KEYS, FAMILIES, parse_config_json
from experiments.model.huggingface import DecoderFiles
from experiments.model.presets import PRESETS
from runner.errors import InvalidError
from runner.huggingface.safetensors import drop_config_keys
from tests.experiments.hugging_face.cases import CASES, DAILY, arguments
from tests.experiments.hugging_face.published import OTHERS, PUBLISHED

GPT2: dict[str, Any] = {
    **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    **{"bos_token_id": 50_256, "eos_token_id": 50_256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5},
    **{"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
    **{"resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True},
    **{"summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50_257},
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}


def make_config(name: str) -> dict[str, Any]:
    """Return the config.json of a case, with the keys as they are given to transformers."""
    model_type, keys = arguments(name)
    return {"model_type": model_type} | keys


def read(config: dict[str, Any]) -> object:
    """Return what the reader of the family makes of a config.json."""
    return (
        PretrainGPT.read_published_model(config) if config["model_type"] == "gpt2" else parse_config_json(config).stages
    )


@pytest.mark.parametrize("config", [*map(make_config, DAILY), GPT2], ids=lambda config: config["model_type"])
def test_an_unknown_key_is_refused_by_name_unless_it_is_ignored(config):
    keys = {"attention_multiplier": 0.5, "use_mixture_of_depths": False}
    with pytest.raises(InvalidError) as caught:
        read(config | keys)
    line, family = str(caught.value), config["model_type"]
    assert "\n" not in line
    for key in keys:
        assert f"{key}: unknown key of {family}" in line
    assert "ignored_config_keys: [attention_multiplier, use_mixture_of_depths]" in line
    assert "--ignore-config-key use_mixture_of_depths" in line
    assert read(drop_config_keys(config | keys, [*keys])) == read(config)
    assert read(config | dict.fromkeys(keys)) == read(config)  # null counts as absent


def test_hostile_keys_are_refused_in_one_short_line():
    with pytest.raises(InvalidError) as caught:
        read(make_config("llama") | {f"key\n{number}": {"a": [number]} for number in range(100_000)})
    assert "\n" not in str(caught.value)
    assert r"key\n0: unknown key of llama" in str(caught.value)
    assert str(caught.value).count("unknown key of llama") == 16


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", [name for name in DAILY if name != "gemma4"])
def test_an_unknown_key_of_rotary_positions_is_refused_by_its_path(name, section):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5.0}
    config = {key: value for key, value in make_config(name).items() if not key.startswith("rope_")}
    expected = read(config | {section: rope})
    with pytest.raises(
        InvalidError, match=rf"^{section}\.factr: unknown key of {config['model_type']}; did you mean fa"
    ):
        read(config | {section: rope | {"factr": 2.0}})
    dropped = drop_config_keys(config | {section: rope | {"factr": 2.0}}, [f"{section}.factr"])
    assert read(dropped) == expected


@pytest.mark.parametrize("name", ["olmo3-thetas", "gemma4"])
def test_an_unknown_key_of_a_kind_of_layers_is_refused_by_its_path(name):
    config = make_config(name)
    ropes = config["rope_parameters"]
    other = config | {"rope_parameters": ropes | {"full_attention": ropes["full_attention"] | {"finetuned": True}}}
    with pytest.raises(InvalidError, match=r"^rope_parameters\.full_attention\.finetuned: unknown key"):
        read(other)
    assert read(drop_config_keys(other, ["rope_parameters.full_attention.finetuned"])) == read(config)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "softcap of attention in llama": ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: unknown"),
    "softcap of attention in gemma3": ("gemma3", {"attn_logit_softcapping": 50.0}, "50.0 is not supported in gemma3"),
    "bias of the MLP": ("mistral", {"mlp_bias": True}, "mlp_bias: true is not supported in mistral, only false"),
    "attention to the future": ("gemma3", {"use_bidirectional_attention": True}, "true is not supported"),
    "another score": ("deepseek_v3", {"scoring_func": "softmax"}, "softmax is not supported .* only sigmoid"),
    "another score of V2": ("deepseek_v2", {"scoring_func": "sigmoid"}, "sigmoid is not supported"),
    "another choice of experts": ("deepseek_v3", {"topk_method": "greedy"}, "greedy is not supported"),
    "experts on several devices": ("deepseek_v3", {"ep_size": 8}, "ep_size: 8 is not supported"),
    "experts in some layers": ("deepseek_v3", {"moe_layer_freq": 2}, "experts in every layer"),
    "shared keys and values": ("gemma3", {"num_kv_shared_layers": 2}, "2 is not supported in gemma3_text, only 0"),
    "partly rotated heads": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
    "partly rotated heads by section": (
        "llama",
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_scaling.partial_rotary_factor: 0.5 is not supported",
    ),
    "key of another type of positions": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}},
        "rope_scaling.beta_fast: unknown key",
    ),
    "positions by kind": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "rope_parameters.full_attention: unknown key",
    ),
    "scaling by kind": (
        "olmo3",
        {"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_scaling.full_attention: unknown key",
    ),
    "scaling outside of its kind": ("gemma4", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: unknown key"),
    "activation of gpt_oss": ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act: gelu is not supported in gpt_oss"),
    "gates of qwen3_5_moe": ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob: false is not supported"),
    "cross attention": ("llama", {"add_cross_attention": True}, "add_cross_attention: true is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_makes_another_model_is_refused_unless_ignored(case):
    name, keys, message = REFUSED[case]
    with pytest.raises(InvalidError, match=message) as caught:
        read(make_config(name) | keys)
    if found := re.search(r"ignored_config_keys: \[(.*?)\]", str(caught.value)):
        read(drop_config_keys(make_config(name) | keys, found[1].split(", ")))


def test_a_file_without_layers_is_refused():
    with pytest.raises(InvalidError, match=r"^layers: "):
        read(make_config("olmo3") | {"num_hidden_layers": 0, "layer_types": []})


ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"pretraining_tp": 1, "use_bidirectional_attention": False, "num_kv_shared_layers": 0}),
    "mistral": ("mistral", {"attention_bias": False, "mlp_bias": False, "layer_types": None}),
    "gemma3": ("gemma3", {"use_bidirectional_attention": False, "num_kv_shared_layers": 0, "_name_or_path": "x"}),
    "gemma4": ("gemma4", {"use_bidirectional_attention": "vision"}),
    "deepseek_v3": (
        "deepseek_v3",
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1, "seq_aux": True},
    ),
    "classifier": ("qwen2", {"id2label": {"0": "a"}, "label2id": {"a": 0}, "problem_type": None, "num_labels": 1}),
    "generation": ("qwen3", {"temperature": 0.6, "top_p": 0.95, "do_sample": True, "max_length": 20}),
    "older library": (
        "olmo2",
        {"torchscript": False, "pruned_heads": {}, "is_decoder": False, "tf_legacy_loss": False},
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_keys_and_values_that_change_nothing_are_accepted(case):
    name, keys = ACCEPTED[case]
    assert read(make_config(name) | keys) == read(make_config(name))


@pytest.mark.parametrize("name", CASES)
def test_everything_that_an_export_writes_is_accepted(name):
    found = parse_config_json(make_config(name))
    files = DecoderFiles(found, 64, 64)
    assert files.differences(files.config()) == []
    assert parse_config_json(files.config()).stages == found.stages
    # For a model that no family has, the nearest one is named by what differs, not by keys that it does not know.
    with pytest.raises(InvalidError, match="no family of transformers has this model") as caught:
        DecoderFiles(found.model_copy(update={"embedding_scale": 1.5}), 64, 64).config()
    assert "ignored_config_keys" not in str(caught.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_describe_the_presets(name):
    config = PUBLISHED[name]
    files = DecoderFiles(DecoderConfig(preset=name), 64, 64)
    assert files.differences(json.loads(json.dumps(config))) == []
    assert PRESETS[name].get("vocabulary_size") in (None, config.get("vocab_size", 262_208))


@pytest.mark.parametrize("config", [*OTHERS.values(), GPT2], ids=lambda config: config["model_type"])
def test_published_files_without_a_preset_are_accepted(config):
    read(config)


def test_a_name_that_the_file_does_not_have_is_an_error():
    config = {"text_config": {"softcap": 1.0, "rope_scaling": {"finetuned": True}}, "model_type": "gemma3"}
    assert drop_config_keys(config, ["softcap", "rope_scaling.finetuned"]) == {
        "text_config": {"rope_scaling": {}},
        "model_type": "gemma3",
    }
    assert "softcap" in config["text_config"]
    for name, hint in {"sofcap": "softcap", "rope_scaling.finetund": "rope_scaling.finetuned"}.items():
        with pytest.raises(InvalidError, match=rf"has no key {name} to ignore; did you mean {hint}\?"):
            drop_config_keys(config, [name])


class Recorder(dict[str, Any]):
    """Content of a config.json that records the keys that are read.

    Defaults that a reader puts below it keep the record; values that it puts above are its own, and are not recorded.
    """

    def __init__(self, content: dict[str, Any], read: set[str] | None = None, own: frozenset[str] = frozenset()):
        super().__init__(content)
        self.read, self.own = set() if read is None else read, own

    def _record(self, key: str) -> None:
        if key not in self.own:
            self.read.add(key)

    def __getitem__(self, key: str) -> Any:
        self._record(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._record(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._record(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Any:
        raise AssertionError("a copy of the content would not record; use `|`")

    def __or__(self, other: Any) -> "Recorder":
        return Recorder(dict(self.items()) | dict(other), self.read, self.own | other.keys())

    def __ror__(self, other: Any) -> "Recorder":
        return Recorder(dict(other) | dict(self.items()), self.read, self.own)


@pytest.mark.parametrize("name", CASES)
def test_readers_read_only_keys_that_their_family_declares(name):
    config = Recorder(make_config(name))
    parse_config_json(config)
    assert {"num_hidden_layers", "rms_norm_eps"} < config.read
    allowed = COMMON_KEYS | FAMILIES[make_config(name)["model_type"]].keys
    assert config.read - {"text_config"} <= allowed
    # In sections likewise, whatever their type is.
    for section in ("rope_scaling", "rope_parameters"):
        rope = make_config(name).get(section)
        if isinstance(rope, dict) and "full_attention" not in rope:
            inner = Recorder(rope)
            parse_config_json(make_config(name) | {section: inner})
            known = {"factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"}
            known |= {"truncate", "mscale", "mscale_all_dim"}
            assert {f"rope.{key}" for key in inner.read - known} <= allowed


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_every_key_that_transformers_writes_is_accepted(name):
    transformers = pytest.importorskip("transformers", reason="needs pip install -e '.[parity]'")
    model_type, keys = arguments(name)
    config = transformers.AutoConfig.for_model(model_type, **keys)
    for content in (config.to_dict(), json.loads(config.to_json_string(use_diff=False)), config.to_diff_dict()):
        assert len(content) > 15
        parse_config_json({"num_attention_heads": 8, "num_hidden_layers": 2} | content)
