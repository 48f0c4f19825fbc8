"""Exports to and imports from a bucket of each cloud, also while some requests fail."""

from pathlib import Path

import jax
import pytest
from safetensors.numpy import load

from runner import BaseTrainer
from runner.huggingface.export import ExportOptions, export
from runner.storage import parse_json
from tests.huggingface.test_init_from import StartOnlyGPT, run_start_only
from tests.support.object_stores import BACKENDS, Backend, Faults, route_stores_to, start_backend
from tests.support.tiny_jobs import are_leaves_equal, make_gpt

pytestmark = pytest.mark.soak
SHARD_BYTES = 20_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> BaseTrainer:
    """A finished run on a disk."""
    job = make_gpt(tmp_path_factory.mktemp("cloud") / "run", **{"config.train.total_steps": 4})
    job()
    return job


def export_dir(run: BaseTrainer, where: str) -> str:
    export(str(run.store.root), "newest", run.family(), run.config.data, where, ExportOptions(shard_bytes=SHARD_BYTES))
    return where


def read_prefix(backend: Backend, top: str) -> dict[str, bytes]:
    """Return the objects below a prefix of a bucket by relative name."""
    return {name.removeprefix(f"{top}/"): backend.read(name) for name in backend.names(f"{top}/")}


@pytest.mark.parametrize("name", BACKENDS)
def test_an_export_to_a_bucket_equals_one_to_a_disk(
    name: str, run: BaseTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = Path(export_dir(run, str(tmp_path / "out")))
    with start_backend(name) as backend:
        route_stores_to(monkeypatch, backend)
        backend.proxy.faults = Faults(error_rate=0.3, error_statuses=(503,))
        export_dir(run, backend.url(tmp_path.name))
        assert backend.proxy.fired["error"]
        found = read_prefix(backend, tmp_path.name)
    assert found == {path.name: path.read_bytes() for path in on_disk.iterdir()}
    index = parse_json(found["model.safetensors.index.json"])
    assert {len(load(found[file])) for file in index["weight_map"].values()} != {0}
    assert len(set(index["weight_map"].values())) > 1


@pytest.mark.parametrize("name", BACKENDS)
def test_a_job_starts_from_weights_in_a_bucket(
    name: str, run: BaseTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_backend(name) as backend:
        route_stores_to(monkeypatch, backend)
        source = export_dir(run, backend.url(tmp_path.name))
        backend.proxy.faults = Faults(error_rate=0.3, error_statuses=(503,))
        begun = run_start_only(make_gpt(run.store.root.parent / name, StartOnlyGPT, **{"checkpoint.init_from": source}))
        assert backend.proxy.fired["error"]
    assert are_leaves_equal(begun, jax.device_get(run.state.params))
