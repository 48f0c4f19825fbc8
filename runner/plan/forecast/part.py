"""Which part of a step an op belongs to, from what it does and from the calls that led to it.

Asked in this order: the optimizer, whatever it does; kernels; what only saves or reads a slice of a stack; what only
moves values to another layout; matmuls; the loss; and what is left.
"""

import re

from runner.plan.forecast.kernel import is_attention_kernel, is_kernel
from runner.plan.forecast.matmul import matmuls_in
from runner.plan.forecast.module import Module, Op
from runner.plan.forecast.movement import FREE
from runner.plan.hlo.source import Frame

MATMULS, ATTENTION, ELEMENTWISE = "matmuls", "attention", "elementwise and reductions"
ACTIVATIONS, LAYOUT, GATHERS = "saving and reading slices", "layout changes", "gathers and scatters"
LOSS, OPTIMIZER, KERNELS = "loss", "optimizer", "other kernels"
PARTS = (MATMULS, ATTENTION, ELEMENTWISE, ACTIVATIONS, LAYOUT, GATHERS, LOSS, OPTIMIZER, KERNELS)

_MOVES = {"copy", "transpose", "reshape", "slice", "pad", "concatenate", "convert", "broadcast", "reverse", *FREE}
_SLICES = {"dynamic-slice", "dynamic-update-slice"}
_CHANGES = {"copy", "transpose", "reshape", "concatenate", "pad", "reverse"}
_OF_OPTIMIZER = re.compile(r"/optax/(?!losses)|/train/optimizer|/train/recipe")
_LOSS_FILE = re.compile(r"/train/loss\.py$|/optax/losses/")
_LOSS_NAME = re.compile(r"loss|cross_entropy|log_softmax", re.IGNORECASE)
_LOSS_OPS = re.compile(r"log_softmax|logsumexp|cross_entropy")
_ATTENTION = re.compile(r"attention|attend", re.IGNORECASE)
_MATMUL_KERNEL = re.compile(r"ragged|gmm|matmul|gemm|grouped", re.IGNORECASE)


def part_of(module: Module, op: Op, calls: tuple[Frame, ...]) -> str:
    """The part of a step that an op's time belongs to. `calls` led to it, innermost first."""
    if any(_OF_OPTIMIZER.search(frame.file) for frame in calls):
        return OPTIMIZER
    if is_kernel(op):
        if is_attention_kernel(op):
            return ATTENTION
        return MATMULS if _MATMUL_KERNEL.search(op.name) else KERNELS
    opcodes = set(_opcodes(module, op))
    own = [frame for frame in calls if not frame.is_installed]
    matmuls = matmuls_in(module, op)
    if not matmuls and opcodes & _SLICES and opcodes <= _MOVES | _SLICES:
        return ACTIVATIONS
    if not matmuls and "dynamic-update-slice" in _results(module, op):
        return ACTIVATIONS
    if opcodes & _CHANGES and opcodes <= _MOVES:
        return LAYOUT
    if matmuls:
        is_batched = any(matmul.batch > 1 for matmul in matmuls)
        return ATTENTION if is_batched and any(_ATTENTION.search(frame.function) for frame in own) else MATMULS
    if any(_LOSS_FILE.search(frame.file) for frame in calls) or (own and _LOSS_NAME.search(own[0].function)):
        return LOSS
    if opcodes & {"gather", "scatter"}:
        return GATHERS
    if _LOSS_OPS.search(op.rest):
        return LOSS
    return ATTENTION if own and _ATTENTION.search(own[0].function) else ELEMENTWISE


def _opcodes(module: Module, op: Op) -> list[str]:
    inner = module.fused(op)
    if not inner:
        return [op.opcode]
    return [opcode for part in module.computations.get(inner, {}).values() for opcode in _opcodes(module, part)]


def _results(module: Module, op: Op) -> list[str]:
    """The opcodes that make the results of an op, seen through names."""
    inner = module.fused(op)
    value: Op | None = module.root(inner) if inner else op
    if value is not None and value.opcode == "tuple":
        return [opcode for part in module.operands(value) if part for opcode in _results_of(module, part)]
    return _results_of(module, value) if value is not None else []


def _results_of(module: Module, value: Op) -> list[str]:
    if value.opcode in ("bitcast", "reshape") and (before := module.operand(value, 0)) is not None:
        return _results_of(module, before)
    return _results(module, value) if value.opcode == "fusion" else [value.opcode]
