"""Kernels of TPUs, interpreted where there is none."""

import functools

import pytest

from experiments.model.platform import for_tpus


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels, ours and JAX's."""
    pallas = for_tpus("experiments.model.tpu_attention").pl
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
    splash = for_tpus("jax.experimental.pallas.ops.tpu.splash_attention")
    monkeypatch.setattr(splash, "make_splash_mqa", functools.partial(splash.make_splash_mqa, interpret=True))


@pytest.fixture
def interpreted_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped products."""
    kernel = for_tpus("jax.experimental.pallas.ops.tpu.megablox.gmm")
    for name in ("gmm", "tgmm"):
        monkeypatch.setattr(kernel, name, functools.partial(getattr(kernel, name), interpret=True))
