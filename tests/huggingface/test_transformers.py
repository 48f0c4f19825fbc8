"""The real `transformers` opens exports, computes the same, and its files are imported bit for bit."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer, open_checkpoint
from runner.evaluation.generation import make_variables
from runner.huggingface.export import ExportOptions, export
from tests.huggingface.test_init_from import weights_begun_with
from tests.support.tiny import TEXT, gpt, leaves_equal

pytestmark = pytest.mark.soak
PROMPT = "12 squared is 144.\n"


# Queries, keys and values of latents, experts whose biases are variables beside the parameters.
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
    job = gpt(tmp_path_factory.mktemp("run") / "run", job_class, **changes | {"config.train.total_steps": 4})
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
    assert leaves_equal(weights_begun_with(tmp_path / "saved", run, weights), expected)
