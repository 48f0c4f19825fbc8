"""Lists, histograms and texts in every writer, and percentiles of step times."""

import csv
import io
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import jax.numpy as jnp
import pynvml
import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runner.dashboard.charts import RunCurves
from runner.metrics.rows import EncodedRow, format_csv, select_surviving
from runner.metrics.wandb import convert_value
from runner.metrics.window import StepTimer
from runner.metrics.writers import _PlainProgress, _TensorBoardWriter
from runner.parallel import mesh
from runner.storage import LocalStore

HISTOGRAM = {"counts": [1, 0, 3], "edges": [-1.0, 0.0, 1.0, 2.0]}
ROW: dict[str, Any] = {
    "step": 4,
    "train/loss": 1.5,
    "train/some": HISTOGRAM,
    "val/list": [0.5, None, 1.5],
    "val/none": None,
    "val/sample/0": "two\nlines of é",
}


def test_tensorboard_shows_histograms_and_texts(tmp_path: Path) -> None:
    events = _TensorBoardWriter(LocalStore(tmp_path), "run", 1)
    events.supersede()
    events.add(ROW)
    events.finish()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Scalars("train/loss")[0].value == 1.5
    shown = found.Histograms("train/some")[0].histogram_value
    assert (shown.num, shown.min, shown.max) == (4, -1, 2)
    assert (shown.bucket_limit, shown.bucket) == ([0, 1, 2], [1, 0, 3])
    assert shown.sum == pytest.approx(-0.5 + 3 * 1.5)
    assert found.Histograms("val/list")[0].histogram_value.num == 2
    (text,) = found.Tensors("val/sample/0")
    assert text.tensor_proto.string_val[0].decode() == ROW["val/sample/0"]
    assert found.SummaryMetadata("val/sample/0").plugin_data.plugin_name == "text"
    assert "val/none" not in str(found.Tags())


def test_wandb_gets_histograms() -> None:
    shown = convert_value(HISTOGRAM)
    assert isinstance(shown, wandb.Histogram)
    assert (list(shown.histogram), list(shown.bins)) == (HISTOGRAM["counts"], HISTOGRAM["edges"])
    assert isinstance(convert_value([1.0, 2.0]), wandb.Histogram)
    assert [convert_value(value) for value in (1.5, None, "text", [])] == [1.5, None, "text", []]


def test_csv_encodes_lists_as_json_and_pages_omit_them() -> None:
    header, line = csv.reader(io.StringIO("".join(format_csv([EncodedRow.from_row(ROW)]))))
    cells = dict(zip(header, line, strict=True))
    assert json.loads(cells["train/some"]) == HISTOGRAM
    assert json.loads(cells["val/list"]) == ROW["val/list"]
    assert cells["val/sample/0"] == ROW["val/sample/0"]
    curves = RunCurves()
    curves.add(ROW)
    assert set(curves.keys) == {"train/loss", "val/none"}


def test_a_row_of_step_0_needs_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    first = {"step": 0, "train/tokens": 0, "val/loss": 2.0}
    damaged = [{"step": 0}, {"step": 1, "train/tokens": 0}, {"step": "0", "train/tokens": 0}]
    assert [line.row for line in select_surviving(json.dumps(row).encode() for row in [*damaged, first, ROW])] == [
        first,
        ROW,
    ]
    _PlainProgress(lambda step: 50 * step, 200).show(first)
    assert capsys.readouterr().out == "step 0/200  val 2.0000\n"


def test_percentiles_count_only_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ended = [100.0], threading.Semaphore(0)
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def wait(loss: Any) -> None:
        ended.acquire(timeout=60)

    monkeypatch.setattr("jax.block_until_ready", wait)
    pace = StepTimer()
    pace.restart()
    assert pace.pop_percentiles() == {}
    for seconds in [*range(1, 20), 50]:
        now[0] += seconds
        pace.add(jnp.float32(1))
        ended.release()
        drain(pace)
    assert pace.pop_percentiles() == {"perf/step_seconds_median": 10.5, "perf/step_seconds_p95": 19.0}
    now[0] += 1000.0  # an evaluation
    pace.restart()
    now[0] += 2.0
    pace.add(jnp.float32(1))
    ended.release()
    assert pace.pop_percentiles() == {"perf/step_seconds_median": 2.0, "perf/step_seconds_p95": 2.0}
    pace.close()
    pace._thread.join(60)
    assert not pace._thread.is_alive()


def drain(pace: StepTimer) -> None:
    """Wait until all added steps are counted."""
    seen = threading.Event()
    pace._ends.put(seen)
    assert seen.wait(60)


def test_peak_memory_is_that_of_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mesh.read_peak_memory_bytes() is None
    stats: list[dict[str, int] | None] = [None, {}, {"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 9}]
    devices = [type("Device", (), {"memory_stats": staticmethod(lambda each=each: each)}) for each in stats]
    monkeypatch.setattr("jax.local_devices", lambda: devices)
    assert mesh.read_peak_memory_bytes() == 9
    assert mesh.read_memory_counter("bytes_in_use") is None


class Gpu(NamedTuple):
    """What JAX says of a device."""

    local_hardware_id: int


@pytest.mark.parametrize(
    ("visible", "numbers", "share"),
    [
        (None, [0, 1, 2, 3], 0.25),
        ("", [0, 2], 0.2),
        ("3,1", [0, 1], 0.3),
        ("1", [0], 0.2),
        ("GPU-0,GPU-3", [0, 1], 0.25),
        ("7", [0], None),  # the driver has no such device
        ("1", [5], None),
        ("MIG-GPU-1", [0], None),
    ],
)
def test_the_utilisation_of_gpus_is_that_of_the_visible_ones(
    visible: str | None, numbers: list[int], share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mesh.read_gpu_utilization() is None, "these are CPUs"
    by_index = {index: (index + 1) * 10 for index in range(4)}  # percent
    by_name = {f"GPU-{index}": value for index, value in by_index.items()}

    def look_up(handles: dict[Any, int]) -> Callable[[Any], int]:
        def get(key: Any) -> int:
            if key not in handles:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return handles[key]

        return get

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", look_up(by_index))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", look_up(by_name))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=handle, memory=1))
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("jax.local_devices", lambda: [Gpu(number) for number in numbers])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = mesh.read_gpu_utilization()
    assert found is None if share is None else found == pytest.approx(share)


@pytest.mark.parametrize("missing", ["driver", "package"])
def test_without_the_library_of_a_driver_there_is_no_utilisation(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    if missing == "package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    assert mesh.read_gpu_utilization() is None
