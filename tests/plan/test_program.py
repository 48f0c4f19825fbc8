"""Both steps of a job are compiled side by side, and the validation step for the split of the batch that fits."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from runner.plan.program import compile_program

TEXT = "HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n"
MACHINE: Any = SimpleNamespace(hbm_bytes=100, devices=[0], devices_per_domain=1, is_faked=False)


def compiled(first: str, fitting: str, deadline_seconds: float = 60.0) -> list[str]:
    """Return the splits that the validation step was compiled for, while the train step waited for the first."""
    compiled, is_begun = [], threading.Event()

    def compile_val(_: Any, abstract: Any, layout: str) -> None:
        compiled.append(layout)
        is_begun.set()

    def compile_train(*_: Any) -> Any:
        assert is_begun.wait(deadline_seconds), "the validation step waits for the train step"
        return SimpleNamespace(layout=fitting, text=TEXT)

    state = SimpleNamespace(replace=lambda **_: None)
    train_setup: Any = SimpleNamespace(compile_val=compile_val, abstract_state=state, mesh_sizes={"data": 1})
    setup_builder: Any = SimpleNamespace(get_largest_layout=lambda _: first, compile=compile_train, val_step=None)
    program = compile_program(setup_builder, train_setup, MACHINE)
    assert program.val_compile_seconds is not None
    return compiled


@pytest.mark.parametrize(("fitting", "layouts"), [("large", ["large"]), ("small", ["large", "small"])])
def test_the_validation_step_is_compiled_beside_the_train_step_and_again_for_what_fits(
    fitting: str, layouts: list[str]
) -> None:
    assert compiled("large", fitting) == layouts
