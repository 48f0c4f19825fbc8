"""Compilation of the train and validation steps for a split of the batch.

Steps are traced, lowered and compiled once, from abstract shapes and ahead of the first step, so that nothing is traced
again during training. The compiler's own memory figures determine the largest micro-batch that fits in device memory.
This module does not depend on the model or the data.
"""

import base64
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.extend.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec

from runner.accelerator import is_gpu_deterministic, make_compiler_options
from runner.checkpoint.leaves import find_form_problems, is_on_host, make_strongly_typed
from runner.console import warn
from runner.errors import InvalidError, StateError
from runner.jax_internals import fused_attention_stablehlo, tpu
from runner.metrics.meta import (
    LEARNING_RATE,
    REPLAY_DIGESTS,
    RESERVED_NAMES,
    TOKEN_COUNT,
    replace_sums_by_means,
    validate_meta,
)
from runner.optim.library import find_injected_rate
from runner.parallel.canonical import canonicalise
from runner.parallel.mesh import use_sharding_rules
from runner.train.auxiliary import AuxiliaryState, validate_auxiliary
from runner.train.layout import BatchLayout
from runner.train.replay import ReplayInputs, get_digests, make_abstract_replay, use_replay_inputs
from runner.train.state import TrainState, get_shardings, move_to_device, move_to_host
from runner.train.step import Batch

MEMORY_SHARE = 0.9  # share of a device's memory that a step may be planned to use
_CUDNN_CONFIG = "create_dot_product_attention_backend_config"  # function of JAX that writes the options of a call
CompilerOptions = Mapping[str, str | bool | int]  # options of XLA by name
# XLA generates the code of a CPU program in several parts in parallel. The code of an operation, down to the last bit,
# can depend on the other operations of its part, and these depend on the number of devices.
_CODE_PARTS = "xla_cpu_parallel_codegen_split_count"
# Parts of a program's text that may differ although the code is the same: addresses of Python functions, and Pallas
# kernels for TPUs, whose bytecode has the file and line of each operation.
_ADDRESS = re.compile(r'(@CustomSPMDPartitioning\(.*?backend_config = )"\d+"')
_KERNEL = re.compile(r"(?<=body\\22: \\22)[A-Za-z0-9+/=]+(?=\\22)")
_VAL_RESERVED = ("loss", "bits_per_byte")  # the runner's own metrics below `val/`


def trace_train_step(
    train_step: Callable[..., Any],
    schedule: optax.Schedule | None,
    abstract: TrainState,
    key: jax.Array,
    layout: BatchLayout,
    auxiliary_states: Sequence[AuxiliaryState] = (),
) -> jax.stages.Traced:
    """Trace `(state, batch, key) -> (state, loss, meta)` with the state donated.

    If the layout `is_replayable`, the function also takes `ReplayInputs` and returns the digests of the gradients,
    see `runner.train.replay`. The meta gets the `learning_rate` of the step, if there is a schedule or an optimizer
    whose state holds the rate, and the `token_count`, if batches differ in it. `train_step` is a function of (state,
    batch, key of the step, accumulation steps). `key`, that of the run, may be abstract.

    Raises:
        StateError: `train_step` returns leaves of another shape or type than it takes; the error names them.
        InvalidError: metrics cannot hold the meta, an auxiliary state with an update is returned unchanged, or a step
            that must be replayable returns no digests.
    """

    # plan.forecast finds this function by its qualified name, in the stack frames of the compiled program.
    def step(state: TrainState, batch: Batch, key: jax.Array, *replay: ReplayInputs) -> tuple[Any, ...]:
        step_key = jax.random.fold_in(key, state.step)
        rate = None if schedule is None else jnp.asarray(schedule(state.step), jnp.float32)
        with use_replay_inputs(*replay or [None]):
            after, loss, meta = train_step(state, batch, step_key, layout.accumulate_steps)
        digests = [] if not replay else [get_digests(meta)]
        meta = {name: value for name, value in meta.items() if name != REPLAY_DIGESTS}
        if auxiliary_states:
            validate_auxiliary(auxiliary_states, state.riders, after.riders)
        after = make_strongly_typed(after)
        if problems := find_form_problems(after, abstract):
            raise StateError(
                f"train_step must return a state of the same leaves, shapes and types as it takes{problems}"
            )
        validate_meta(meta, RESERVED_NAMES if layout.has_sequences else (*RESERVED_NAMES, "examples"))
        # The count is part of this program, since a program of its own would be launched every step.
        count = None if TOKEN_COUNT in meta else layout.compute_target_weight(batch)
        counted = {} if count is None else {TOKEN_COUNT: count}
        # An optimizer of optax.inject_hyperparams keeps its rate in its state.
        rate = find_injected_rate(after.opt_state) if rate is None else rate
        return after, loss, meta | counted | ({} if rate is None else {LEARNING_RATE: rate}), *digests

    # The returned state has the shardings of the given one, so that it can be donated to the next step.
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    program = canonicalise(step) if layout.is_ordered else step

    def offloaded(state: TrainState, *others: Any) -> tuple[Any, ...]:
        after, *results = program(move_to_device(state, abstract), *others)
        return move_to_host(after, abstract), *results

    # Without offloaded leaves the program is left as it is, so that its compiled form stays the same.
    has_offloaded = any(map(is_on_host, jax.tree.leaves(abstract)))
    replay = [make_abstract_replay(abstract, layout.mesh, layout.is_ordered)] if layout.is_replayable else []
    jitted = jax.jit(
        offloaded if has_offloaded else program,
        donate_argnums=0,
        out_shardings=(get_shardings(abstract), replicated, replicated, *(replicated for _ in replay)),
    )
    with use_sharding_rules(layout.mesh):
        return jitted.trace(abstract, layout.abstract_batch(), jax.eval_shape(lambda: key), *replay)


def trace_val_step(val_step: Callable[..., Any], abstract: TrainState, layout: BatchLayout) -> jax.stages.Traced:
    """Trace `(state, batch) -> (loss_sum, token_count, last_meta)`, with meta on every device.

    Raises `InvalidError` if metrics cannot hold the meta.
    """
    # Every process writes or compares metrics, so metrics that are arrays must be replicated.
    replicated = NamedSharding(layout.mesh, PartitionSpec())

    def replicate(leaf: Any) -> Any:
        return jax.lax.with_sharding_constraint(leaf, replicated) if jnp.ndim(leaf) else leaf

    @functools.wraps(val_step)
    def checked(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, Any]:
        loss_sum, token_count, meta = val_step(state, batch)
        shown = jax.eval_shape(replace_sums_by_means, meta, token_count) if isinstance(meta, Mapping) else meta
        validate_meta(shown, _VAL_RESERVED)
        return loss_sum, token_count, jax.tree.map(replicate, meta)

    with use_sharding_rules(layout.mesh):
        return jax.jit(canonicalise(checked) if layout.is_ordered else checked).trace(abstract, layout.abstract_batch())


def lower_step(traced: jax.stages.Traced, layout: BatchLayout) -> jax.stages.Lowered:
    """Lower a step that was traced for this layout."""
    if layout.mesh.devices.flat[0].platform == "gpu" and is_gpu_deterministic(os.environ):
        mark_cudnn_gradients_deterministic()
    with use_sharding_rules(layout.mesh):
        return traced.lower()


def mark_cudnn_gradients_deterministic() -> None:
    """Have JAX ask for deterministic gradients of cuDNN attention in each call, for the rest of this process.

    Under `xla_gpu_deterministic_ops` XLA adds `force_deterministic` to the first of several equal calls only, such as
    those of unrolled layers. The first step then ends with "IndexError: raw_hash_map<>::at" (openxla/xla, pull request
    46500; seen with jax 0.11.2 on an H200). Calls that have the option from the start are all found. With several
    devices JAX writes the options while XLA partitions the program: the text of a lowered program lacks them.
    """
    make_config = getattr(fused_attention_stablehlo, _CUDNN_CONFIG, None)
    if make_config is None or hasattr(make_config, "__wrapped__"):
        return

    @functools.wraps(make_config)
    def make_deterministic_config(*args: Any, **options: Any) -> str:
        config = json.loads(make_config(*args, **options))
        attention = config["cudnn_fmha_backend_config"]
        if "bmm1_grad_gemm1_dot_dimension_numbers" in attention:
            attention["force_deterministic"] = True
        return json.dumps(config)

    setattr(fused_attention_stablehlo, _CUDNN_CONFIG, make_deterministic_config)


def compile_lowered(lowered: jax.stages.Lowered, layout: BatchLayout) -> tuple[jax.stages.Compiled, CompilerOptions]:
    """Compile for the devices of a layout; return the executable and the compiler options of the chip catalogue."""
    device = layout.mesh.devices.flat[0]
    options: CompilerOptions = make_compiler_options(device.device_kind, os.environ, lowered.as_text())
    # The option exists on CPUs only.
    if layout.is_ordered and device.platform == "cpu":
        options = {**options, _CODE_PARTS: 1}
    given: Any = dict(options)  # jax's signature allows no integers, XLA does
    return lowered.compile(compiler_options=given or None), options


def compute_program_digest(lowered: jax.stages.Lowered) -> str:
    """Return a digest of the StableHLO that the compiler is given.

    It depends neither on positions in source files nor on addresses in this process.
    """
    text = _KERNEL.sub(_remove_positions, _ADDRESS.sub(r"\1", lowered.as_text()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remove_positions(match: re.Match[str]) -> str:
    """Return the text of a kernel, without positions in source files, for its bytecode in base64."""
    try:
        with ir.Context() as context:
            # Most operations of the stable form belong to no dialect that is registered.
            context.allow_unregistered_dialects = True
            tpu.register_dialect(context)
            return str(ir.Module.parse(base64.b64decode(match[0])).operation.get_asm(enable_debug_info=False))
    except ir.MLIRError as error:
        warn(f"a kernel cannot be read, so the digest of the program depends on its place in the source: {error}")
        return match[0]


@dataclass(frozen=True)
class ProgramMemory:
    """Memory that a compiled program needs on each device, in bytes, by the compiler's own figures."""

    arguments: int
    outputs: int  # those that do not reuse the memory of arguments
    temporaries: int  # as planned: those alive at the same time, and fragmentation
    code: int  # generated
    peak: int = 0  # temporaries that are alive at the same time; 0 where the compiler does not report it
    workspace: int = 0  # of calls of libraries, as estimated where the compiler cannot ask them

    @property
    def needed(self) -> int:
        """Everything that the program holds in the device's memory while it runs, its code included."""
        return self.arguments + self.outputs + self.temporaries + self.code + self.workspace


def get_program_memory(compiled: Any) -> ProgramMemory:
    """Return the memory figures of a compiled program."""
    found = compiled.memory_analysis()
    return ProgramMemory(
        found.argument_size_in_bytes,
        found.output_size_in_bytes - found.alias_size_in_bytes,
        found.temp_size_in_bytes,
        found.generated_code_size_in_bytes,
        # The peak counts arguments in host memory too.
        max(found.peak_memory_in_bytes - found.argument_size_in_bytes - found.host_argument_size_in_bytes, 0),
    )


@dataclass(frozen=True)
class CompiledStep:
    """Compiled train step and the layout of the batch that it is for."""

    layout: BatchLayout  # split of the global batch
    # `(state, batch, key) -> (state, loss, meta)`, the state donated; see `trace_train_step`.
    executable: jax.stages.Compiled
    digest: str  # of the StableHLO that the compiler was given
    memory: ProgramMemory
    # XLA options that the compiler was given (`runner.accelerator.make_compiler_options`).
    options: CompilerOptions = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Compiled program as HLO text."""
        text = self.executable.as_text()
        assert text is not None, "every backend can print its programs"
        return text


class StepTooLargeError(InvalidError):
    """Error for a step that needs more memory than a device has; `needed_bytes` is a lower bound."""

    def __init__(self, message: str, needed_bytes: int):
        super().__init__(message)
        self.needed_bytes = needed_bytes


class _SizedStep(Protocol):
    """Step whose memory is known."""

    @property
    def memory(self) -> ProgramMemory:
        """Memory that the step needs."""


SizedStepT = TypeVar("SizedStepT", bound=_SizedStep)


def compile_to_fit(compile_step: Callable[[int], SizedStepT], sizes: list[int], limit_bytes: int) -> SizedStepT:
    """Compile with the largest micro-batch whose arguments, outputs and temporaries fit, and return the result.

    After a size that does not fit, the next guess is the largest size whose share of the temporaries would fit. `sizes`
    are the micro-batches to try, in examples per device and descending; `limit_bytes` is the memory of a device.

    Raises:
        StepTooLargeError: even the smallest size does not fit; the error has the numbers.
        InvalidError: the compiler runs out of another memory than HBM, which a smaller size would not help.
    """
    while True:
        try:
            compiled = compile_step(sizes[0])
        except jax.errors.JaxRuntimeError as error:
            temporaries = _parse_needed_temporaries(str(error))
            if temporaries is None:
                raise
            resident_bytes = 0  # a compiler that refuses reports only the memory that it ran out of
        else:
            memory = compiled.memory
            if memory.needed <= limit_bytes:
                return compiled
            temporaries = memory.temporaries + memory.workspace
            resident_bytes = memory.needed - temporaries
        if len(sizes) == 1:
            needed = f"needs {(resident_bytes + temporaries) / 2**30:.2f} GiB on each device"
            raise StepTooLargeError(
                f"a step with {sizes[0]} example(s) a device {needed}{'' if resident_bytes else ', the state aside,'} "
                f"and {limit_bytes / 2**30:.2f} GiB are there; use a smaller micro_batch_examples, more devices, a "
                "larger fsdp or tensor axis, or config.memory.remat",
                resident_bytes + temporaries,
            )
        # Temporaries grow about linearly with the micro-batch, arguments and outputs not at all.
        share = max(limit_bytes - resident_bytes, 0) / temporaries
        sizes = [size for size in sizes[1:] if size <= sizes[0] * share] or sizes[-1:]


def _parse_needed_temporaries(message: str) -> int | None:
    """Return the bytes that a program needs, from the message with which its compiler refused it.

    None if the compiler did not run out of memory. Raises `InvalidError` if it ran out of a memory on the chip itself,
    such as a TPU's vmem.
    """
    if not message.startswith("RESOURCE_EXHAUSTED"):
        return None
    space = re.search(r"memory space (\w+)", message)
    if space is not None and space[1] != "hbm":
        sizes = re.search(r"with size (\S+) and limit (\S+)", message)
        numbers = f", of which it needs {sizes[1]} and may use {sizes[2]}" if sizes else ""
        raise InvalidError(
            f"the compiler runs out of {space[1]}, memory on the chip itself{numbers}; a flag of LIBTPU_INIT_ARGS sets "
            "how much it may use (--xla_tpu_scoped_vmem_limit_kib), or asks for what does not fit there"
        )
    found = re.search(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT]?)", message)
    return None if found is None else int(float(found[1]) * 2 ** (10 * " KMGT".index(found[2] or " ")))
