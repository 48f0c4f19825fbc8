"""Kernels of TPUs, interpreted where there is none."""

import functools

import pytest

from experiments.model.form import for_tpus


@pytest.fixture
def interpreted_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped products."""
    kernel = for_tpus("jax.experimental.pallas.ops.tpu.megablox.gmm")
    for name in ("gmm", "tgmm"):
        monkeypatch.setattr(kernel, name, functools.partial(getattr(kernel, name), interpret=True))
