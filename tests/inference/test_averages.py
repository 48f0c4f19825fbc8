"""`sample`, `evaluate` and `export` with averages of the weights, by name."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from runner import open_checkpoint
from tests.inference.test_commands import capture_command, read_evaluated_rows, score
from tests.support.tiny_jobs import make_gpt
from tests.test_values import TrainLookup

SETTINGS: dict[str, Any] = {
    "job": "tests.test_values:TrainLookup",
    "config.ema": {"decays": [0.5], "evaluate": True},
    "config.train.total_steps": 2,
    "config.eval": {"every_steps": 2, "batches": 1},
    "config.optimizer.learning_rate": 10.0,
    "config.schedule.warmup_steps": 0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a few steps."""
    directory = tmp_path_factory.mktemp("averages") / "run"
    make_gpt(directory, TrainLookup, **SETTINGS)()
    return directory


def test_the_loss_of_an_average_is_bit_identical_to_its_row(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    row = read_evaluated_rows(run)[2]
    (record,) = score(capfd, run, "--weights", "ema_0.5")
    assert record["weights"] == "ema_0.5"
    assert np.float32(record["loss"]) != np.float32(row["val/loss"])
    assert np.float32(record["loss"]) == np.float32(row["val/ema_0.5/loss"])
    assert capture_command(capfd, run, "--weights", "ema_0.5", command="evaluate")[1].startswith(
        "step 2 ema_0.5: loss "
    )


def test_an_average_generates_other_text(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, text, err = capture_command(capfd, run, "--prompt", "12", "--tokens", 30, "--weights", "ema_0.5")
    assert (code, err) == (0, "tiny: step 2, ema_0.5\n")
    assert text != capture_command(capfd, run, "--prompt", "12", "--tokens", 30)[1]


@pytest.mark.soak
def test_an_average_is_exported_as_it_is_stored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    narrow = {"config.model": {"layers": 1, "heads": 2, "width": 16}, "config.precision.params": "bfloat16"}
    make_gpt(run, **SETTINGS | narrow | {"job": "experiments.gpt:PretrainGPT"})()
    assert capture_command(capfd, run, "--weights", "ema_0.5", "-o", run.parent / "out", command="export")[0] == 0
    found = load_file(run.parent / "out" / "model.safetensors")
    weights, _ = open_checkpoint(run, weights="ema_0.5")
    trained, _ = open_checkpoint(run)
    assert jax.tree.structure(weights) == jax.tree.structure(trained)
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype("bfloat16")}
    assert found["transformer.ln_f.weight"].dtype == np.float32
    sums = [sum(float(np.abs(leaf).sum()) for leaf in leaves) for leaves in (found.values(), jax.tree.leaves(weights))]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    code, _, err = capture_command(capfd, run, "--weights", "ema_0.9", "-o", run.parent / "none", command="export")
    assert (code, len(err.splitlines())) == (2, 1)


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_an_unknown_average_gives_one_line(run: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = capture_command(capfd, run, "--weights", "ema_0.9", command=command)
    assert (code, out) == (2, "")
    assert "got weights 'ema_0.9', has params, ema_0.5; needs one of them" in err
    assert len(err.splitlines()) == 1
