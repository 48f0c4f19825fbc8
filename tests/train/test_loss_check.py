"""A `forward` that returns a mean is refused before the first step; sums, and other losses that are legal, are not."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.gpt import PretrainGPT
from runner.errors import InvalidError
from runner.train.loss import target_weights
from tests.support.tiny_jobs import make_gpt, make_mesh_options

Forward = Callable[..., Any]


def compute_losses(apply_fn: Any, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of each target, and its weight, both (B, T)."""
    weights = target_weights(batch)
    logits = apply_fn({"params": params}, batch["x"], deterministic=True)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], axis=-1)[..., 0]
    return -chosen * weights, weights


def token_mean(losses: jax.Array, weights: jax.Array) -> Any:
    return losses.sum() / weights.sum(), {}


def plain_mean(losses: jax.Array, weights: jax.Array) -> Any:
    return losses.mean(), {}


def mean_of_sequences(losses: jax.Array, weights: jax.Array) -> Any:
    return losses.sum(axis=1).mean(), {}


def scaled_mean(losses: jax.Array, weights: jax.Array) -> Any:
    return 100 * losses.mean(), {}


def mean_with_count(losses: jax.Array, weights: jax.Array) -> Any:
    return losses.mean(), {"token_count": weights.sum()}


def negative_mean(losses: jax.Array, weights: jax.Array) -> Any:
    return -losses.mean(), {}


def plain_sum(losses: jax.Array, weights: jax.Array) -> Any:
    return losses.sum(), {}


def sum_with_count(losses: jax.Array, weights: jax.Array) -> Any:
    return losses.sum(), {"token_count": weights.sum()}


def sum_of_sequence_means(losses: jax.Array, weights: jax.Array) -> Any:
    return losses.mean(axis=1).sum(), {"token_count": jnp.float32(len(losses))}


def contrastive(losses: jax.Array, weights: jax.Array) -> Any:
    return -jax.nn.log_softmax(losses.mean(axis=1)).sum(), {"token_count": jnp.float32(len(losses))}


def squared_sum(losses: jax.Array, weights: jax.Array) -> Any:
    return jnp.square(losses.sum()), {}


def nothing(losses: jax.Array, weights: jax.Array) -> Any:
    return 0 * losses.sum(), {}


def not_finite(losses: jax.Array, weights: jax.Array) -> Any:
    return losses.sum() / 0, {}


def sum_for_pairs(losses: jax.Array, weights: jax.Array) -> Any:
    if len(losses) % 2:
        raise ValueError("needs pairs")
    return losses.sum(), {}


MEANS = (token_mean, plain_mean, mean_of_sequences, scaled_mean, mean_with_count, negative_mean)
LEGAL = (plain_sum, sum_with_count, sum_of_sequence_means, contrastive, squared_sum, nothing, not_finite, sum_for_pairs)


def make_job_class(reduce: Forward, **attributes: Any) -> type[PretrainGPT]:
    def forward(cls: Any, apply_fn: Any, params: Any, batch: Any, key: Any) -> Any:
        losses = compute_losses(apply_fn, params, batch)
        return reduce(*losses)  # .mean() of it

    return type("Own", (PretrainGPT,), {"forward": classmethod(forward), "__module__": __name__, **attributes})


class CheckPassedError(Exception):
    """The check has passed, and the first step would begin."""


def start(directory: Path, job_class: type[PretrainGPT], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Start the job, and stop it before its first step."""
    job = make_gpt(directory / "run", job_class, **changes)

    def stop(self: Any) -> None:
        raise CheckPassedError

    monkeypatch.setattr(type(job), "run", stop)
    job()


@pytest.mark.daily(3)
@pytest.mark.parametrize("mesh", [(8, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.soak)])
@pytest.mark.parametrize("reduce", MEANS)
def test_a_mean_is_refused_with_its_line(
    reduce: Forward, mesh: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_class = make_job_class(reduce)
    with pytest.raises(InvalidError, match="forward of Own returns a mean") as caught:
        start(tmp_path, job_class, monkeypatch, **make_mesh_options(*mesh))
    lines, first = inspect.getsourcelines(make_job_class)
    number = first + next(index for index, line in enumerate(lines) if "# .mean()" in line)
    assert str(caught.value).startswith(f"{__file__}:{number}: ")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.daily(3)
@pytest.mark.parametrize("reduce", LEGAL)
def test_other_losses_are_not_refused(reduce: Forward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckPassedError):
        start(tmp_path, make_job_class(reduce), monkeypatch)


def test_a_class_can_state_that_its_loss_is_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckPassedError):
        start(tmp_path, make_job_class(plain_mean, returns_loss_sum=True), monkeypatch)


def test_the_shipped_jobs_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.train.checks.BatchLayout", None)
    with pytest.raises(CheckPassedError):
        start(tmp_path, PretrainGPT, monkeypatch)
