"""Choice of the largest micro-batch that fits in device memory, from the memory figures of the compiled step."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from runner.accelerator import CHIPS
from runner.data import FieldSpec
from runner.data.packing import make_token_fields
from runner.errors import InvalidError
from runner.train.compile import (
    StepTooLargeError,
    compile_lowered,
    compile_to_fit,
    get_program_memory,
    mark_cudnn_gradients_deterministic,
)
from runner.train.layout import BatchLayout
from tests.support.tiny_jobs import make_full_mesh

GIB = 2**30
RESIDENT, PER_EXAMPLE = 4 * GIB, GIB


class Compiler:
    """A fake compiler; its step needs 4 GiB for the donated state and 1 GiB per example."""

    def __init__(self):
        self.tried = []

    def __call__(self, size):
        self.tried.append(size)
        figures = SimpleNamespace(
            argument_size_in_bytes=RESIDENT,
            output_size_in_bytes=RESIDENT,
            alias_size_in_bytes=RESIDENT,
            temp_size_in_bytes=size * PER_EXAMPLE,
            generated_code_size_in_bytes=0,
            host_argument_size_in_bytes=0,
            peak_memory_in_bytes=0,
        )
        program = SimpleNamespace(memory_analysis=lambda: figures)
        return SimpleNamespace(size=size, memory=get_program_memory(program))


@pytest.mark.parametrize(
    ("limit_gib", "chosen", "tried"),
    [(100, 12, [12]), (16, 12, [12]), (15.9, 6, [12, 6]), (8, 4, [12, 4]), (7.5, 3, [12, 3]), (5, 1, [12, 1])],
)
def test_the_largest_fitting_size_is_found_with_few_compilations(limit_gib, chosen, tried):
    compiler = Compiler()
    compiled = compile_to_fit(compiler, [12, 6, 4, 3, 2, 1], int(limit_gib * GIB))
    assert compiled.size == chosen
    assert compiler.tried == tried


class LimitedCompiler(Compiler):
    """A fake compiler that rejects a step larger than the device memory, as a TPU's does."""

    def __init__(self, limit_gib, message):
        super().__init__()
        self._limit_gib, self._message = limit_gib, message

    def __call__(self, size):
        if 4 + size > self._limit_gib:
            self.tried.append(size)
            raise jax.errors.JaxRuntimeError(self._message.format(size))
        return super().__call__(size)


OUT_OF_MEMORY_MESSAGES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries ({}.00G) exceeds "
    "available HBM (15.75G).",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used {}.00G of 15.75G hbm. Exceeded hbm capacity.",
)


@pytest.mark.parametrize("message", OUT_OF_MEMORY_MESSAGES)
def test_an_out_of_memory_error_makes_it_try_smaller_sizes(message):
    compiler = LimitedCompiler(8, message)
    assert compile_to_fit(compiler, [12, 6, 4, 3, 2, 1], 8 * GIB).size == 4
    assert compiler.tried == [12, 6, 4]
    with pytest.raises(
        InvalidError, match=r"1 example\(s\) a device needs 1.00 GiB on each device, the state aside, and"
    ):
        compile_to_fit(LimitedCompiler(4, message), [2, 1], 4 * GIB)


def test_other_compiler_errors_are_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_to_fit(LimitedCompiler(4, "INTERNAL: a bug"), [2, 1], 4 * GIB)


# Message of libtpu 0.0.42.1.
VMEM_MESSAGE = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating on "
    "stack for %dynamic_update_slice.339 = bf16[2,2,256,256] dynamic-update-slice(%bitcast). Scoped allocation with "
    "size 768.0K and limit 16.0K exceeded scoped vmem limit by 752.0K. Used {}"
)


def test_running_out_of_vmem_does_not_try_smaller_sizes():
    compiler = LimitedCompiler(1, VMEM_MESSAGE)
    with pytest.raises(InvalidError, match=r"runs out of vmem, .* needs 768\.0K and may use 16\.0K;") as caught:
        compile_to_fit(compiler, [4, 2, 1], 8 * GIB)
    assert not isinstance(caught.value, StepTooLargeError)
    assert compiler.tried == [4]


@pytest.mark.parametrize("limit_gib", [4.5, 3, 0])
def test_the_error_states_memory_needed_and_available(limit_gib):
    with pytest.raises(InvalidError) as caught:
        compile_to_fit(Compiler(), [4, 2, 1], int(limit_gib * GIB))
    need = f"a step with 1 example(s) a device needs 5.00 GiB on each device and {limit_gib:.2f} GiB are there"
    assert need in str(caught.value)


def test_the_layout_splits_the_global_batch_over_devices_and_micro_batches():
    fields = make_token_fields({"x": np.int32, "weight": np.float32}, 16)
    layout = BatchLayout(make_full_mesh(2, 2, 2), 96, micro_batch_examples=3, fields=fields)
    assert (layout.micro_batch, layout.accumulate_steps) == (12, 8)
    assert {leaf.shape for leaf in layout.abstract_batch().values()} == {(8, 12, 16)}
    assert {name: leaf.dtype for name, leaf in layout.abstract_batch().items()} == {"x": np.int32, "weight": np.float32}


def test_arrays_of_any_rank_are_split_over_their_examples_alone():
    fields = {"image": FieldSpec(np.dtype(np.uint8), (28, 28, 3)), "padding_mask": FieldSpec(np.dtype(np.bool_), ())}
    layout = BatchLayout(make_full_mesh(2, 2, 2), 96, micro_batch_examples=3, fields=fields)
    batch = layout.abstract_batch()
    assert {name: leaf.shape for name, leaf in batch.items()} == {"image": (8, 12, 28, 28, 3), "padding_mask": (8, 12)}
    assert {leaf.sharding.shard_shape(leaf.shape)[:2] for leaf in batch.values()} == {(8, 3)}
    assert layout.compute_target_weight({}) is None


def test_programs_are_compiled_with_the_flags_of_their_chip(monkeypatch):
    fields = make_token_fields({"x": np.int32}, 16)
    lowered, layout = jax.jit(jnp.sin).lower(1.0), BatchLayout(make_full_mesh(8, 1, 1), 8, 1, fields)
    assert compile_lowered(lowered, layout)[1] == {}
    flagged = replace(CHIPS["cpu"], compiler_flags=("--xla_cpu_enable_fast_math=false",))
    monkeypatch.setitem(CHIPS, "cpu", flagged)
    assert compile_lowered(lowered, layout)[1] == {"xla_cpu_enable_fast_math": False}
    whole = {"xla_cpu_parallel_codegen_split_count": 1}
    assert compile_lowered(lowered, replace(layout, is_ordered=True))[1] == {"xla_cpu_enable_fast_math": False} | whole
    monkeypatch.setitem(CHIPS, "cpu", replace(flagged, compiler_flags=("--xla_no_such_flag=true",)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_flag"):
        compile_lowered(lowered, layout)


def test_each_gradient_of_cudnn_attention_asks_for_determinism(monkeypatch):
    """XLA finds the second of two equal calls only if both have the option from the start."""

    def sum_of_layers(x_BxTxNxH):
        for _ in range(2):
            x_BxTxNxH = jax.nn.dot_product_attention(
                x_BxTxNxH, x_BxTxNxH, x_BxTxNxH, is_causal=True, implementation="cudnn"
            )
        return x_BxTxNxH.astype(jnp.float32).sum()

    def count_options():
        traced = jax.jit(jax.grad(sum_of_layers)).trace(jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@__cudnn$fmhaSoftmaxBackward") == text.count("@__cudnn$fmhaSoftmax(") == 2
        return text.count("force_deterministic")

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    name = "create_dot_product_attention_backend_config"
    monkeypatch.setattr(fused_attention_stablehlo, name, getattr(fused_attention_stablehlo, name))
    assert count_options() == 0
    mark_cudnn_gradients_deterministic()
    jax.clear_caches()
    assert count_options() == 2
    mark_cudnn_gradients_deterministic()
    jax.clear_caches()
    assert count_options() == 2
