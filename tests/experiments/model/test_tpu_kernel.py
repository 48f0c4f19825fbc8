"""Compilation of attention by libtpu for every kind of TPU, head width and sequence length."""

import pytest

from runner.accelerator import CHIPS
from tests.support.libtpu import run_module

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if chip.is_tpu])
def test_every_tpu_compiles_attention_and_uses_the_fused_kernel(chip: str) -> None:
    found = run_module("tests.experiments.model.tpu_kernel", f"{chip}-8")
    assert {case: said for case, (_, said) in found.items() if said} == {}
    assert {form for form, _ in found.values()} <= {"fused_attention", "splash_attention"}
    common = [form for case, (form, _) in found.items() if "4096 long, bfloat16" in case]
    assert set(common) == {"fused_attention"}
