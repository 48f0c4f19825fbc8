"""Interpreted TPU kernels, for machines without a TPU."""

import functools

import pytest

from experiments.model.platform import import_for_tpu


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret the attention kernels, ours and JAX's."""
    pallas = import_for_tpu("experiments.model.tpu_attention").pl
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
    splash = import_for_tpu("jax.experimental.pallas.ops.tpu.splash_attention")
    monkeypatch.setattr(splash, "make_splash_mqa", functools.partial(splash.make_splash_mqa, interpret=True))


@pytest.fixture
def interpreted_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret the kernels of grouped matmuls."""
    kernel = import_for_tpu("jax.experimental.pallas.ops.tpu.megablox.gmm")
    for name in ("gmm", "tgmm"):
        monkeypatch.setattr(kernel, name, functools.partial(getattr(kernel, name), interpret=True))
    monkeypatch.setattr(kernel.pl, "pallas_call", functools.partial(kernel.pl.pallas_call, interpret=True))
