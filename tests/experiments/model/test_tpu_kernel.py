"""libtpu compiles attention for every kind of TPU: heads of every width, rows of every length, and all options."""

import pytest

from runner.accelerator import CHIPS
from tests.support.libtpu import printed_by

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if chip.is_tpu])
def test_every_tpu_has_attention_of_every_kind_and_a_kernel_of_ours_for_common_rows(chip: str) -> None:
    found = printed_by("tests.experiments.model.tpu_kernel", f"{chip}-8")
    assert {case: said for case, (_, said) in found.items() if said} == {}
    assert {form for form, _ in found.values()} <= {"fused_attention", "splash_attention"}
    common = [form for case, (form, _) in found.items() if "4096 long, bfloat16" in case]
    assert set(common) == {"fused_attention"}
