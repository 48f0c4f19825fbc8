"""Concurrent compilation of the train and validation steps for the micro-batch that fits."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from runner.errors import SpecError
from runner.parallel.mesh import AXES
from runner.plan.program import compile_program
from runner.spec import Document, SpecLocation
from runner.train.compile import ProgramMemory, StepTooLargeError

TEXT = "HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n"
MACHINE: Any = SimpleNamespace(usable_bytes=90, devices=[0], devices_per_domain=1, is_faked=False, spans_domains=False)

MESH = dict.fromkeys(AXES, 1)


def list_compiled_splits(first: str, fitting: str, deadline_seconds: float = 60.0) -> list[str]:
    """Return the layouts for which the validation step is compiled; the train step waits for the first of them."""
    compiled, is_begun = [], threading.Event()

    def compile_val(_: Any, abstract: Any, layout: str) -> None:
        compiled.append(layout)
        is_begun.set()

    def compile_train(*_: Any) -> Any:
        assert is_begun.wait(deadline_seconds), "the validation step waits for the train step"
        return SimpleNamespace(layout=fitting, text=TEXT)

    state = SimpleNamespace(replace=lambda **_: None)
    train_setup: Any = SimpleNamespace(compile_val=compile_val, abstract_state=state, mesh_sizes={"data": 1})
    setup_builder: Any = SimpleNamespace(
        list_layouts=lambda *_: [first], compile_by=compile_train, recipe=SimpleNamespace(val_step=None)
    )
    program = compile_program(setup_builder, train_setup, MACHINE)
    assert program.val_compile_seconds is not None
    return compiled


@pytest.mark.parametrize(("fitting", "layouts"), [("large", ["large"]), ("small", ["large", "small"])])
def test_the_validation_step_is_recompiled_for_the_split_that_fits(fitting: str, layouts: list[str]) -> None:
    assert list_compiled_splits("large", fitting) == layouts


@pytest.mark.parametrize(("arguments", "on_host", "fits"), [(60, 0, True), (95, 0, False), (135, 70, True)])
def test_temporaries_of_another_compiler_reject_no_step(
    arguments: int, on_host: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fake device has no memory of a host, and counts what is offloaded to it among its own.
    monkeypatch.setattr("runner.plan.program.count_bytes_per_device", lambda _, on_host=False: on_host * offloaded)
    offloaded = on_host
    tried: list[tuple[int, int | None]] = []

    def compile_train(_: Any, __: Any, limit_bytes: int, micro_batch: int | None) -> Any:
        tried.append((limit_bytes, micro_batch))
        return SimpleNamespace(layout="small", text=TEXT, memory=ProgramMemory(arguments, 5, 10**12, 0))

    setup_builder: Any = SimpleNamespace(
        list_layouts=lambda *_: ["small"], compile_by=compile_train, document=Document({}, {(): SpecLocation("x")})
    )
    machine: Any = SimpleNamespace(**vars(MACHINE) | {"is_faked": True, "spans_domains": True})
    with contextlib.nullcontext() if fits else pytest.raises(SpecError, match="topology: state and batch alone") as e:
        train_setup: Any = SimpleNamespace(mesh_sizes=MESH, abstract_state={})
        compile_program(setup_builder, train_setup, machine, with_val=False, micro_batch=2)
    if e is not None:
        assert isinstance(e.value.__cause__, StepTooLargeError)
    ((limit_bytes, micro_batch),) = tried
    assert limit_bytes > 10**12
    assert micro_batch == 2
