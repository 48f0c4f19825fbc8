"""The compiled steps: traced from abstract shapes, never from arrays, and the micro-batch that fits a device.

Compiled ahead of the first step, so nothing is ever traced again. Knows no model and no data.
"""

import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from runner.accelerator import make_compiler_options
from runner.checkpoint.leaves import find_form_problems, make_strongly_typed
from runner.errors import InvalidError, StateError
from runner.metrics.meta import TOKEN_COUNT, replace_sums_by_means, validate_meta
from runner.optim.library import find_injected_rate
from runner.parallel.canonical import canonicalise
from runner.parallel.mesh import use_sharding_rules
from runner.train.batch_layout import BatchLayout
from runner.train.state import AuxiliaryState, TrainState, get_shardings, validate_auxiliary
from runner.train.step import Batch

MEMORY_SHARE = 0.9  # of a device's memory, the part that a step may be planned to use
Options = Mapping[str, str | bool | int]  # of XLA
# XLA generates the code of a CPU's program in as many parts side by side. What it makes of an operation, down to the
# last bit, can depend on what else stands in its part, and that on the number of devices.
_CODE_PARTS = "xla_cpu_parallel_codegen_split_count"
_OF_EVALUATION = ("loss", "bits_per_byte")  # the runner's own figures, in a row below `val/`


def trace_train_step(
    train_step: Callable[..., Any],
    schedule: optax.Schedule | None,
    abstract: TrainState,
    key: jax.Array,
    layout: BatchLayout,
    riders: Sequence[AuxiliaryState] = (),
) -> jax.stages.Traced:
    """Trace `(state, batch, key) -> (state, loss, meta)`, the state donated and coming back as it went in.

    `key` is the run's: the random key of step k is `fold_in(key, k)`. `meta` has the step's `learning_rate` where there
    is a schedule, or an optimizer whose state holds it, and its `token_count` where batches differ in that. Raises
    `StateError` naming the leaves that `train_step` returns in another form than it takes them, and `InvalidError` if
    no row can hold `meta`, or if one of `riders` is left as it is that has an update.
    """

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, jax.Array, Any]:
        step_key = jax.random.fold_in(key, state.step)
        rate = None if schedule is None else jnp.asarray(schedule(state.step), jnp.float32)
        after, loss, meta = train_step(state, batch, step_key, layout.accumulate_steps)
        if riders:
            validate_auxiliary(riders, state.riders, after.riders)
        after = make_strongly_typed(after)
        if problems := find_form_problems(after, abstract):
            raise StateError(f"train_step returns the state in another form than it takes it{problems}")
        validate_meta(meta)
        count = None if TOKEN_COUNT in meta else layout.count(batch)  # here: a program of its own would be one a step
        counted = {} if count is None else {TOKEN_COUNT: count}
        rate = find_injected_rate(after.opt_state) if rate is None else rate
        return after, loss, meta | counted | ({} if rate is None else {"learning_rate": rate})

    replicated = NamedSharding(layout.mesh, PartitionSpec())
    program = canonicalise(step) if layout.is_ordered else step
    jitted = jax.jit(program, donate_argnums=0, out_shardings=(get_shardings(abstract), replicated, replicated))
    with use_sharding_rules(layout.mesh):
        return jitted.trace(abstract, layout.abstract_batch(), jax.eval_shape(lambda: key))


def lower_train_step(traced: jax.stages.Traced, layout: BatchLayout) -> jax.stages.Lowered:
    """Lower what `trace_train_step` has traced for this layout."""
    with use_sharding_rules(layout.mesh):
        return traced.lower()


def trace_val_step(val_step: Callable[..., Any], abstract: TrainState, layout: BatchLayout) -> jax.stages.Traced:
    """Trace `(state, batch) -> (loss_sum, token_count, last_meta)`. Raises `InvalidError` if no row can hold meta."""
    program = _refusing_meta(val_step, layout)
    with use_sharding_rules(layout.mesh):
        return jax.jit(canonicalise(program) if layout.is_ordered else program).trace(abstract, layout.abstract_batch())


def lower_val_step(traced: jax.stages.Traced, layout: BatchLayout) -> jax.stages.Lowered:
    """Lower what `trace_val_step` has traced for this layout."""
    with use_sharding_rules(layout.mesh):
        return traced.lower()


def _refusing_meta(val_step: Callable[..., Any], layout: BatchLayout) -> Callable[..., Any]:
    """`val_step` with its meta checked, and with a copy of each of its lists on every device, since rows need all."""
    replicated = NamedSharding(layout.mesh, PartitionSpec())

    @functools.wraps(val_step)
    def refusing(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, Any]:
        loss_sum, token_count, meta = val_step(state, batch)
        shown = jax.eval_shape(replace_sums_by_means, meta, token_count) if isinstance(meta, Mapping) else meta
        validate_meta(shown, _OF_EVALUATION)
        return loss_sum, token_count, jax.tree.map(whole, meta)

    def whole(leaf: Any) -> Any:
        return jax.lax.with_sharding_constraint(leaf, replicated) if jnp.ndim(leaf) else leaf

    return refusing


def compile_lowered(lowered: jax.stages.Lowered, layout: BatchLayout) -> tuple[jax.stages.Compiled, Options]:
    """Compile for the devices of a layout, with the options that the catalogue has for them; returns these, too."""
    device = layout.mesh.devices.flat[0]
    options: Options = make_compiler_options(device.device_kind, os.environ, lowered.as_text())
    if layout.is_ordered and device.platform == "cpu":
        options = {**options, _CODE_PARTS: 1}
    given: Any = dict(options)  # numbers among them, of which the signature does not know
    return lowered.compile(compiler_options=given or None), options


def compute_program_digest(lowered: jax.stages.Lowered) -> str:
    """What tells programs apart: a digest of the StableHLO that the compiler is given."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ProgramMemory:
    """What a compiled program needs on each device, in bytes, by its own figures."""

    arguments: int
    outputs: int  # those that do not take the place of arguments
    temporaries: int  # as planned: what is alive at once, and what lies between
    code: int
    peak: int = 0  # of temporaries that are alive at once; 0 where the compiler does not say it

    @property
    def needed(self) -> int:
        """All of it but the code, which the device's own limit leaves out."""
        return self.arguments + self.outputs + self.temporaries


def get_program_memory(compiled: Any) -> ProgramMemory:
    """The figures of a compiled program."""
    found = compiled.memory_analysis()
    return ProgramMemory(
        found.argument_size_in_bytes,
        found.output_size_in_bytes - found.alias_size_in_bytes,
        found.temp_size_in_bytes,
        found.generated_code_size_in_bytes,
        max(found.peak_memory_in_bytes - found.argument_size_in_bytes, 0),
    )


@dataclass(frozen=True)
class CompiledStep:
    """A train step that the compiler has accepted, for the layout that fits.

    Attributes:
        executable: `(state, batch, key) -> (state, loss, meta)`, the state donated.
        digest: of the StableHLO that the compiler was given.
        options: of XLA, that it was given besides (`runner.accelerator.make_compiler_options`).
    """

    layout: BatchLayout
    executable: jax.stages.Compiled
    digest: str
    memory: ProgramMemory
    options: Options = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The compiled program, as HLO."""
        text = self.executable.as_text()
        assert text is not None, "every backend can print its programs"
        return text


class StepTooLargeError(InvalidError):
    """A step needs more memory than a device has."""

    def __init__(self, message: str, needed_bytes: int):
        super().__init__(message)
        self.needed_bytes = needed_bytes  # at least


def compile_to_fit(compile_step: Callable[[int], CompiledStep], sizes: list[int], limit_bytes: int) -> CompiledStep:
    """Compile with the largest of `sizes` (descending) whose arguments, outputs and temporaries fit, and return that.

    After one that does not fit, the next guess is the size whose share of the temporaries would fit. Raises
    `StepTooLargeError` with the numbers if the smallest does not fit, and `InvalidError` where the compiler is short of
    another memory than the large one, of which no smaller size needs less.
    """
    while True:
        try:
            compiled = compile_step(sizes[0])
        except jax.errors.JaxRuntimeError as error:
            _refuse_shortage(str(error))
            temporaries = _refused_temporaries(str(error))
            if temporaries is None:
                raise
            resident_bytes = 0  # a compiler that refuses says only what it was short of
        else:
            memory = compiled.memory
            if memory.needed <= limit_bytes:
                return compiled
            temporaries, resident_bytes = memory.temporaries, memory.needed - memory.temporaries
        if len(sizes) == 1:
            needed = f"needs {(resident_bytes + temporaries) / 2**30:.2f} GiB on each device"
            raise StepTooLargeError(
                f"a step with {sizes[0]} example(s) a device {needed}{'' if resident_bytes else ', the state aside,'} "
                f"and {limit_bytes / 2**30:.2f} GiB are there; use a smaller micro_batch_examples, more devices, a "
                "larger fsdp or tensor axis, or config.memory.remat",
                resident_bytes + temporaries,
            )
        share = max(limit_bytes - resident_bytes, 0) / temporaries
        sizes = [size for size in sizes[1:] if size <= sizes[0] * share] or sizes[-1:]


def _refuse_shortage(message: str) -> None:
    """Raise `InvalidError` if a compiler ran out of a memory on the chip, such as a TPU's vmem."""
    space = re.search(r"memory space (\w+)", message)
    if message.startswith("RESOURCE_EXHAUSTED") and space is not None and space[1] != "hbm":
        sizes = re.search(r"with size (\S+) and limit (\S+)", message)
        numbers = f", of which it needs {sizes[1]} and may use {sizes[2]}" if sizes else ""
        raise InvalidError(
            f"the compiler runs out of {space[1]}, memory on the chip itself{numbers}; a flag of LIBTPU_INIT_ARGS sets "
            "how much it may use (--xla_tpu_scoped_vmem_limit_kib), or asks for what does not fit there"
        )


def _refused_temporaries(message: str) -> int | None:
    """Bytes that a program would have needed which its compiler refused; None if it refused for another reason."""
    if not message.startswith("RESOURCE_EXHAUSTED"):
        return None
    found = re.search(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT]?)", message)
    return None if found is None else int(float(found[1]) * 2 ** (10 * " KMGT".index(found[2] or " ")))
