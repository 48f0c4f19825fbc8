"""Adapters in PEFT's layout: base and adapter give the merged weights, by numpy and in the real `peft`."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer, open_checkpoint
from runner.cli.app import run_command
from runner.errors import InvalidError
from tests.support.tiny_jobs import get_job_name, make_gpt

COMMON: dict[str, Any] = {
    "config.schedule": {"name": "constant"},
    "config.optimizer": {"learning_rate": 0.05},
    "config.train": {"total_steps": 2, "global_batch_examples": 16},
    "config.data.validation_fraction": 0,
    "config.data.sequence_length": 8,
}
pytestmark = pytest.mark.soak
SIZES = {"layers": 2, "heads": 2, "width": 16}
JOBS: dict[str, tuple[type[BaseTrainer], dict[str, Any], list[str]]] = {
    # Two of the three matrices that form one tensor in the files are adapted.
    "gpt_2": (PretrainGPT, SIZES, ["blocks.query", "blocks.value", "blocks.mlp_out"]),
    "llama": (PretrainDecoder, SIZES | {"mlp_width": 24}, ["*.query", "*.mlp.down"]),
}


@pytest.fixture(scope="module", params=list(JOBS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseTrainer:
    """A finished run that adapts the export `base` beside it."""
    job_class, model, targets = JOBS[request.param]
    place = tmp_path_factory.mktemp("peft")
    first = make_gpt(place / "first", job_class, **COMMON | {"job": get_job_name(job_class), "config.model": model})
    first()
    assert run_command(["export", str(place / "first"), "-o", str(place / "base")]) == 0
    rule = {"rank": 4, "alpha": 6.0, "targets": targets}
    beside = {"checkpoint.init_from": str(place / "base"), "config.adapter": rule}
    job = make_gpt(
        place / "run", job_class, **COMMON | {"job": get_job_name(job_class), "config.model": model} | beside
    )
    job()
    return job


@pytest.fixture(scope="module")
def place(run: BaseTrainer) -> Path:
    found = run.store.root
    assert found is not None
    assert run_command(["export", str(found), "-o", str(found.parent / "merged")]) == 0
    assert run_command(["export", str(found), "--adapter", "-o", str(found.parent / "adapter")]) == 0
    return found.parent


def test_base_and_adapter_files_make_the_merged_weights(place: Path) -> None:
    config = json.loads((place / "adapter" / "adapter_config.json").read_text())
    adapter = load_file(place / "adapter" / "adapter_model.safetensors")
    base, merged = load_file(place / "base" / "model.safetensors"), load_file(place / "merged" / "model.safetensors")
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == str(place / "base")
    assert len(adapter) == 2 * len(config["target_modules"])
    for module in config["target_modules"]:
        a, b = (adapter[f"base_model.model.{module}.lora_{which}.weight"] for which in "AB")
        rank, alpha = config["rank_pattern"].get(module, config["r"]), config["alpha_pattern"].get(module, 6.0)
        assert a.shape[0] == b.shape[1] == rank
        delta = alpha / rank * b @ a
        delta = delta.T if config["fan_in_fan_out"] else delta
        assert np.abs(delta).max() > 1e-3
        np.testing.assert_allclose(merged[f"{module}.weight"], base[f"{module}.weight"] + delta, rtol=1e-5, atol=1e-6)
    others = base.keys() - {f"{module}.weight" for module in config["target_modules"]}
    assert all(np.array_equal(base[name], merged[name]) for name in others)


def test_a_run_without_an_adapter_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"checkpoint 2 has no adapter: .* leave --adapter"):
        run_command(["export", str(place / "first"), "--adapter", "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_an_embedding_is_refused(place: Path, tmp_path: Path) -> None:
    beside = {"checkpoint.init_from": str(place / "base"), "config.adapter": {"targets": ["*embedding"]}}
    job_class, model, _ = JOBS["gpt_2"]
    if "gpt2" not in (place / "base" / "config.json").read_text():
        job_class, model, _ = JOBS["llama"]
    job = make_gpt(
        tmp_path / "run", job_class, **COMMON | {"job": get_job_name(job_class), "config.model": model} | beside
    )
    job()
    with pytest.raises(InvalidError, match=r"embedding .* no plain form .* export without --adapter"):
        run_command(["export", str(tmp_path / "run"), "--adapter", "-o", str(tmp_path / "out")])


def test_peft_computes_what_the_merged_model_computes(run: BaseTrainer, place: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    ids = np.random.default_rng(0).integers(0, 256, (2, 8))
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "base")
    with torch.no_grad():
        without = model(torch.tensor(ids)).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(model, str(place / "adapter"))
        theirs = adapted(torch.tensor(ids)).logits.numpy()
    weights, _ = open_checkpoint(place / "run")
    ours = jax.jit(lambda params: run.model().apply(params, ids, deterministic=True))({"params": weights["params"]})
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-4)
    assert np.abs(theirs - without).max() > 1e-2
