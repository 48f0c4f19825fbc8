"""Platform-dependent form of a model: the same function of the same parameters, arranged for the hardware at hand.

A CPU multiplies two matrices three times faster than a batch of matrices. There tokens are flattened before each matmul
and heads are sliced out of the result. On a TPU each of these reshapes copies all activations, because the attention
kernel reads heads before positions (the head-major layout). There tokens keep their batch and sequence axes, and a
matmul writes heads where the kernel reads them and reads the kernel's result where it was written. On a GPU tokens are
flattened as on a CPU, and what the backward pass reads is kept as on a TPU. Parameters have the same shapes in every
form, so a checkpoint does not depend on it.

All platform decisions are made in this module. They follow the mesh of the caller (`jax.set_mesh`), so that a program
compiled for a TPU on a machine without one takes the TPU's form. Without a mesh the form is the CPU's.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from runner.accelerator import find_chip, parse_accelerator
from runner.config import TrainerConfig
from runner.spec import Topology

SMALL_VMEM_TPUS = ("TPU v4", "TPU v4 lite")  # chips with 16 MiB of VMEM
SAVED_NAME = "kept"  # checkpoint name of the residuals that `remat: dots` saves beside the results of matmuls
WEIGHT_NAME = "weight"  # checkpoint name of parameters in the dtype of the matmuls
QUANTISED_NAME = "quantised"  # checkpoint name of the results of 8-bit matmuls
_CUDNN_FORWARD = "dot_product_attention_fwd"  # JAX's name of the forward pass of cuDNN's attention
_save_quantised: Callable[..., bool] = jax.checkpoint_policies.save_only_these_names(QUANTISED_NAME)
SPLASH_BLOCK_TOKENS = (512, 256, 128)  # block lengths of JAX's TPU attention kernel, the fastest first
LONG_BLOCK_TOKENS = 1024  # block length of the TPU attention kernel where a query sees at least four such blocks

# Sizes of `tpu_attention`. They are here because `attention` chooses block sizes without importing Pallas.
LANES = 128  # lanes of a vector register, and keys of a short step
LONG_STEP = 512  # keys of a long step


def platform() -> str | None:
    """Return the platform that the program is compiled for, by JAX's name; None without a mesh of real devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


def compute_capability() -> tuple[int, int] | None:
    """Return the version of the NVIDIA GPU that the program is compiled for; None if it is for other hardware.

    A GPU that the catalogue does not know must be in this machine.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    chip = None if device is None or device.platform != "gpu" else find_chip(device.device_kind)
    if chip is not None and chip.processors is not None:
        return chip.processors.compute_capability
    if jax.default_backend() != "gpu" or "cuda" not in jax.local_devices()[0].client.platform_version:
        return None
    major, minor = jax.local_devices()[0].compute_capability.split(".")
    return int(major), int(minor)


def vmem_limit_bytes() -> int | None:
    """Return how much VMEM a TPU kernel may use; None is the compiler's default for every kernel, 16 MiB."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None or device.device_kind in SMALL_VMEM_TPUS else 2**25


def uses_head_major_layout() -> bool:
    """Return True if tokens keep their axes and matmuls read and write heads in the attention kernel's order."""
    return platform() == "tpu"


def keeps_residuals() -> bool:
    """Return True if keeping what the backward pass reads costs less than computing it again.

    The step of GPT-2 124M for an H200, by its compiled program: 76.2 ms recomputed, 70.2 ms kept, the same memory.
    """
    return platform() in ("tpu", "gpu")


def writes_gelu_gradient() -> bool:
    """Return True if the gradient of a GELU is written with a sigmoid instead of derived from tanh.

    XLA for GPU computes the derived one in two passes: it writes tanh, which two later results read.
    """
    return platform() == "gpu"


def guesses_logsumexp() -> bool:
    """Return True if a guess at the logsumexp of each token, in place of the maximum, saves a pass over the logits.

    A TPU's compiler then also sums their exponentials in the matmul that makes them.
    """
    return platform() in ("tpu", "gpu")


def rotates_by_matmul() -> bool:
    """Return True if rotary positions swap the halves of a head by a matmul: half a head is half of a TPU's lanes."""
    return platform() == "tpu"


def sums_tokens_by_matmul(dtype: DTypeLike) -> bool:
    """Return True if a product with ones sums 16-bit activations over tokens faster than a reduction.

    By libtpu's estimate for a v5e, a reduction of 16,384 tokens of width 768 takes seven times its roofline.
    """
    return platform() == "tpu" and jnp.dtype(dtype).itemsize == 2


def reduce_scatters_only_rows() -> bool:
    """Return True if the compiler makes a reduce-scatter only of sums whose rows are sharded.

    If columns are sharded, such a compiler emits an all-reduce, which sends twice as much.
    """
    return platform() == "tpu"


def sorts_before_summing() -> bool:
    """Return True if the gradient of a lookup is summed over sorted tokens instead of by a scatter.

    On GPUs a scatter adds in the order in which threads arrive, and its deterministic form is slow: 8.2 ms for the
    gradient of GPT-2's embedding (16,384 tokens of width 768) on an H200, where sorting and summing take 0.6 ms.
    """
    return platform() == "gpu"


def uses_long_blocks(positions: int, visible: int, *heads: jax.Array) -> bool:
    """Return True if the attention kernel should read `positions` in long blocks, where a query sees `visible` keys."""
    is_long = visible >= 4 * LONG_BLOCK_TOKENS and positions % LONG_BLOCK_TOKENS == 0
    return is_long and fits_long_blocks(*heads)


def fits_long_blocks(*heads: jax.Array) -> bool:
    """Return True if long blocks of these queries, keys or values fit the VMEM of every kind of TPU.

    The bound holds with segments and a soft-cap too, as compiled by libtpu for a v4, which has the least VMEM.
    """
    return all(x.dtype.itemsize == 2 and x.shape[-1] <= 128 for x in heads)


def with_row_major_layout(x: jax.Array) -> jax.Array:
    """Return `x`, and pass back its gradient, in row-major memory layout, as kernels read it.

    The compiler would otherwise make positions the minor axis and insert copies. Must be called inside a `shard_map`:
    the partitioner does not split an array with a layout constraint.
    """
    constrained: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return constrained


@jax.custom_vjp
def with_row_major_gradient(x: jax.Array) -> jax.Array:
    """Return `x` unchanged; its gradient gets a row-major layout (see `with_row_major_layout`)."""
    return x


with_row_major_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (with_row_major_layout(gradient),))


def mark_saved(x: jax.Array) -> jax.Array:
    """Return `x`, marked as a residual that `remat: dots` saves, on platforms where recomputing costs more than memory.

    Used for attention and for sums with a matmul's result. Ops that only `x` depends on are then not recomputed either.
    """
    return checkpoint_name(x, SAVED_NAME) if keeps_residuals() else x


def mark_weight(x: jax.Array) -> jax.Array:
    """Return a parameter in the dtype of a matmul, marked as what `remat: dots` saves of layers in line on a GPU.

    Without it each layer's backward pass keeps a copy of the parameter in its own dtype, and converts it again.
    """
    return checkpoint_name(x, WEIGHT_NAME) if platform() == "gpu" else x


def saves_attention(config: TrainerConfig[Any], topology: Topology, mesh: Mesh | AbstractMesh) -> bool:
    """Return True if `remat: dots` saves the results of attention in the program of a job with this topology.

    On a GPU it does those of cuDNN, which is taken for the kernel in 16 bits. A job may be planned on another machine
    than its own, and on a mesh without devices. The topology then names its accelerator.
    """
    uses_cudnn = config.precision.compute != "float32"
    accelerator = parse_accelerator(topology.accelerator)
    if accelerator is not None:
        return accelerator.chip.is_tpu or (accelerator.chip.processors is not None and uses_cudnn)
    target = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None
    return target == "tpu" or (target == "gpu" and uses_cudnn)


def is_cudnn_forward(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return True for the forward pass of cuDNN's attention: a checkpoint policy."""
    return bool(primitive.name.startswith(_CUDNN_FORWARD))


def _save_dots(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Return True for the result of a matmul of weights: the checkpoint policy of `remat: dots` without `mark_saved`.

    The result of an 8-bit matmul is saved after its scales are applied: the sums before that are twice as large. The
    results of cuDNN's attention are saved too.
    """
    is_dot: bool = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params)
    return (
        (is_dot and operands[0].dtype.itemsize > 1)
        or _save_quantised(primitive, *operands, **params)
        or is_cudnn_forward(primitive)
    )


def dots_policy(*, is_in_line: bool = False) -> Callable[..., bool]:
    """Return the checkpoint policy of `remat: dots`; `is_in_line` says that the layers are unrolled."""
    if not keeps_residuals():
        return _save_dots
    policies, names = jax.checkpoint_policies, (SAVED_NAME, WEIGHT_NAME) if is_in_line else (SAVED_NAME,)
    both: Callable[..., bool] = policies.save_from_both_policies(_save_dots, policies.save_only_these_names(*names))
    return both


def import_for_tpu(module: str) -> ModuleType:
    """Import a module of TPU kernels at the moment it is needed: Pallas takes long to import."""
    return importlib.import_module(module)
