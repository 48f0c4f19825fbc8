"""Exports in the real `transformers`: equal outputs, and bit-identical imports of its files."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from experiments.tokenise.inputs import read_file
from runner import BaseTrainer, open_checkpoint
from runner.data.chat import ChatRecord, Dialogue, Renderer, read_template
from runner.evaluation.generation import make_variables
from runner.huggingface.export import ExportOptions, export
from tests.huggingface.test_init_from import load_initial_weights
from tests.support.tiny_jobs import TEXT, are_leaves_equal, make_gpt
from tests.support.tokenise_inputs import SEPARATOR, make_hf_tokenizer, make_tokenise_job, read_corpus

pytestmark = pytest.mark.soak
PROMPT = "12 squared is 144.\n"


# Latent attention, and experts whose biases are variables outside the parameters.
DEEPSEEK_V3: dict[str, Any] = {
    "layers": 3,
    "width": 32,
    "heads": 4,
    "mlp_width": 48,
    "norm_epsilon": 1e-6,
    "rope": {"pairs": "neighbours"},
    "latent": {"query_rank": 12, "key_value_rank": 16, "plain_head_dim": 8, "rotary_head_dim": 4, "value_head_dim": 6},
    "moe": {
        **{"experts": 4, "experts_per_token": 2, "expert_width": 16, "shared_experts": 1, "dense_layers": 1},
        **{"gate": "sigmoid", "bias_rate": 0.01, "groups": 2, "groups_per_token": 1},
    },
}
JOBS: dict[str, tuple[type[BaseTrainer], dict[str, Any]]] = {
    "bytes": (PretrainGPT, {"config.data.tokenizer": "bytes"}),
    "characters": (PretrainGPT, {"config.data.tokenizer": "characters"}),
    "deepseek_v3": (PretrainDecoder, {"config.model": DEEPSEEK_V3}),
}


@pytest.fixture(scope="module", params=JOBS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseTrainer:
    job_class, changes = JOBS[request.param]
    job = make_gpt(tmp_path_factory.mktemp("run") / "run", job_class, **changes | {"config.train.total_steps": 4})
    job()
    return job


@pytest.mark.parametrize(("dtype", "shard_bytes"), [(None, 1 << 30), (None, 20_000), ("bfloat16", 1 << 30)])
def test_transformers_opens_exports_and_its_files_are_imported(
    run: BaseTrainer, tmp_path: Path, dtype: Any, shard_bytes: int
):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    where, out = str(run.store.root), tmp_path / "out"
    export(where, "newest", run.family(), run.config.data, str(out), ExportOptions(dtype, shard_bytes))
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    assert model.dtype == getattr(torch, dtype or "float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer(PROMPT)["input_ids"]
    assert ids == run.dataset.tokenizer.encode(PROMPT).tolist()
    assert tokenizer.decode(ids) == PROMPT
    assert set(tokenizer(TEXT[:5000])["input_ids"]) <= set(range(run.vocabulary_size))

    weights = open_checkpoint(where)[0]
    tokens_BxT = np.array([ids[:16]], np.int32)
    if dtype is None:
        ours = np.asarray(run.model().apply(make_variables(weights), tokens_BxT, deterministic=True))
        with torch.no_grad():
            theirs = model(torch.tensor(tokens_BxT.astype(np.int64))).logits.numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()

    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    expected = jax.tree.map(lambda leaf: leaf.astype(dtype or leaf.dtype).astype(leaf.dtype), weights)
    assert are_leaves_equal(load_initial_weights(tmp_path / "saved", run, weights), expected)


# Dialogues. Turns end with `<|pad|>`; `^` is not a token of the tokenizer.

DIALOGUE = [
    {"role": "user", "content": "naïve 🙂?\n"},
    {"role": "assistant", "content": "yes\n 数"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "no"},
]
TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|pad|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "names": "\n  {% for m in messages %}\n{{ bos_token }}<{{ m.role }}>{{ m.content }}<|pad|>"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}^<assistant>{% endif %}{{ unk_token }}{{ pad_token }}",
}
LLAMA: dict[str, Any] = {"layers": 1, "width": 32, "heads": 4, "mlp_width": 48, "norm_epsilon": 1e-6}
SHORT: dict[str, Any] = {"config.train.total_steps": 4, "config.model": LLAMA}


def write_corpus(directory: Path, kind: str, template: str) -> Path:
    """Tokenise dialogues, and return the path of the corpus."""
    (directory / "tokenizer.json").write_bytes(make_hf_tokenizer())
    settings = {"chat_template": TEMPLATES[template], "bos_token": "^", "eos_token": SEPARATOR}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "lines.jsonl").write_text((json.dumps({"messages": DIALOGUE}) + "\n") * 50)
    tokenizer = {"kind": kind} if kind == "bytes" else {"kind": kind, "file": str(directory / "tokenizer.json")}
    changes = {
        "config.source": str(directory / "lines.jsonl"),
        "config.tokenizer": tokenizer,
        "config.separator": 10 if kind == "bytes" else SEPARATOR,
        "config.chat.template": str(directory / "tokenizer_config.json"),
    }
    make_tokenise_job(directory / "tokenise", **changes)()
    return directory / "tokenise/corpus"


def render(directory: Path) -> Dialogue:
    template = read_template(str(directory / "tokenizer_config.json"), read_file)
    with Renderer(template) as renderer:
        dialogue = renderer.render(ChatRecord(DIALOGUE))
    assert isinstance(dialogue, Dialogue)
    return dialogue


def validate_generation(out: Path, ends: list[int]) -> None:
    """Check that generation stops at each end token with left padding, and that all files for servers exist."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    generation = model.generation_config
    eos = generation.eos_token_id
    assert sorted([eos] if isinstance(eos, int) else eos) == sorted(ends)
    assert 0 <= generation.pad_token_id < config.vocab_size
    raw = json.loads((out / "config.json").read_text())
    assert raw["architectures"] == [type(model).__name__]
    assert raw["torch_dtype"] == "float32"
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in out.iterdir()
    }
    pad = generation.pad_token_id
    tokens = torch.tensor([[pad, pad, 70, 71], [72, 73, 74, 75]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    alone = model.generate(tokens[:1, 2:], attention_mask=mask[:1, 2:], max_new_tokens=3, do_sample=False)
    both = model.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert alone[0, 2:].tolist() == both[0, 4:].tolist()

    class ForcedTokens(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            forced = end if input_ids.shape[1] == 6 else 80
            return torch.full_like(scores, -1e9).index_fill_(1, torch.tensor([forced]), 0.0)

    for end in ends:
        found = model.generate(tokens, attention_mask=mask, max_new_tokens=9, logits_processor=[ForcedTokens()])
        assert found[0, 4:].tolist() == [80, 80, end]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["hf", "bytes"])
def test_transformers_renders_the_text_that_a_corpus_was_made_from(tmp_path: Path, kind: str, template: str):
    transformers = pytest.importorskip("transformers")
    corpus = write_corpus(tmp_path, kind, template)
    job = make_gpt(
        tmp_path / "run",
        PretrainDecoder,
        **SHORT,
        **{"config.data.source": str(corpus), "config.data.train_on": "answers"},
    )
    job()
    out = tmp_path / "out"
    export(str(job.store.root), "newest", job.family(), job.config.data, str(out))
    shutil.rmtree(tmp_path / "run")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    expected = render(tmp_path).text
    assert tokenizer.apply_chat_template(DIALOGUE, tokenize=False) == expected
    ids = tokenizer.apply_chat_template(DIALOGUE, tokenize=True, return_dict=True)["input_ids"]
    assert ids == read_corpus(corpus)[0][:-1].tolist()
    assert len(tokenizer) <= transformers.AutoConfig.from_pretrained(out).vocab_size
    assert tokenizer.model_max_length == 16
    assert transformers.AutoConfig.from_pretrained(out).max_position_embeddings == 16
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    if kind == "hf":
        validate_generation(out, tokenizer.convert_tokens_to_ids([SEPARATOR, "<|pad|>"]))
        assert tokenizer.pad_token_id == transformers.GenerationConfig.from_pretrained(out).pad_token_id
        padded = tokenizer(["one", "naïve, 数字"], padding=True)
        assert sorted(map(sum, padded["attention_mask"])) == sorted(
            len(tokenizer(x).input_ids) for x in ["one", "naïve, 数字"]
        )
    else:
        validate_generation(out, [10])


def test_a_run_on_token_files_exports_what_it_started_from(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    corpus = write_corpus(tmp_path, "hf", "plain")
    changes: dict[str, Any] = {**SHORT, "config.data.source": str(corpus), "config.data.train_on": "answers"}
    first = make_gpt(tmp_path / "first", PretrainDecoder, **changes)
    first()
    base, out = tmp_path / "base", tmp_path / "out"
    export(str(first.store.root), "newest", first.family(), first.config.data, str(base))
    published = transformers.AutoTokenizer.from_pretrained(base)
    end, turn, begin = published.convert_tokens_to_ids([SEPARATOR, "<|pad|>", "a"])
    config = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 64, "bos_token_id": begin}
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn, end], "top_p": 0.9}))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "a", "eos_token": SEPARATOR}
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 64}))
    (base / "chat_template.jinja").write_text(TEMPLATES["names"])
    published = transformers.AutoTokenizer.from_pretrained(base)

    ids = np.concatenate(read_corpus(corpus))
    ids[-1] = first.vocabulary_size - 1  # the model has the vocabulary size of the base
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    changes = {**SHORT, "config.data.source": str(tmp_path / "ids.bin"), "checkpoint.init_from": str(base)}
    second = make_gpt(tmp_path / "second", PretrainDecoder, **changes)
    second()
    shutil.rmtree(base)
    export(str(second.store.root), "newest", second.family(), second.config.data, str(out))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    found = transformers.AutoConfig.from_pretrained(out)
    assert tokenizer.apply_chat_template(DIALOGUE) == published.apply_chat_template(DIALOGUE)
    assert tokenizer(TEXT)["input_ids"] == published(TEXT)["input_ids"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.model_max_length) == ("a", SEPARATOR, 64)
    assert (found.max_position_embeddings, found.bos_token_id) == (64, begin)
    assert transformers.GenerationConfig.from_pretrained(out).top_p == 0.9
    validate_generation(out, [end, turn])
