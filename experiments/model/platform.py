"""The form of a model: what is arranged in another way on each platform, though it computes the same.

A CPU multiplies two matrices three times faster than a batch of them: there tokens are flattened before each matmul,
and heads are cut out of its result. On a TPU each such step is a copy of all activations, since the kernel of attention
wants heads before positions: there tokens stay as they are, and a matmul makes heads where the kernel reads them, and
reads its result where that is written. Parameters have one shape in every form, so that a checkpoint knows of none.

The one place that chooses: parts of models ask it. It goes by the mesh (`jax.set_mesh`), so that a program that is
compiled for a TPU on a machine without one has the TPU's form; without a mesh it is the CPU's.
"""

import importlib
from collections.abc import Callable
from types import ModuleType

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

SMALL_TPUS = ("TPU v4", "TPU v4 lite")  # of 16 MiB of fast memory
KEPT = "kept"  # the name of what `remat: dots` finds beside results of matmuls
LONG_BLOCK_TOKENS = 1024  # that a TPU's attention kernel reads at once, where a query sees at least four times as many


def platform() -> str | None:
    """What the program is compiled for, as JAX names platforms; None without a mesh, or with one that is abstract."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


def fast_memory_bytes() -> int | None:
    """What a kernel of a TPU may take of its fast memory; None is what the compiler leaves to every kernel, 16 MiB."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None or device.device_kind in SMALL_TPUS else 2**25


def keeps_heads_apart() -> bool:
    """Whether tokens are not flattened, and matmuls make and read heads in the order of the attention kernel."""
    return platform() == "tpu"


def multiplies_to_turn() -> bool:
    """Whether heads are turned by a product with a matrix, since half a head is half of what is moved at once."""
    return platform() == "tpu"


def scatters_rows_alone() -> bool:
    """Whether the compiler scatters a sum of which each device keeps rows, but not one of which it keeps columns.

    Those it would add up whole on every device, which sends twice as much.
    """
    return platform() == "tpu"


def takes_long_blocks(positions: int, seen: int, *heads: jax.Array) -> bool:
    """Whether an attention kernel reads so many positions in long blocks, of which a query sees so many."""
    is_long = seen >= 4 * LONG_BLOCK_TOKENS and positions % LONG_BLOCK_TOKENS == 0
    return is_long and fits_long_blocks(*heads)


def fits_long_blocks(*heads: jax.Array) -> bool:
    """Whether long blocks of such queries, keys or values fit the fast memory of every kind of TPU.

    With segments and a soft-cap too: as libtpu compiles them, of which v4 has the least.
    """
    return all(x.dtype.itemsize == 2 and x.shape[-1] <= 128 for x in heads)


def in_order(x: jax.Array) -> jax.Array:
    """`x`, and its gradient, in memory in the order of its axes, as kernels read it.

    The compiler would else let positions lie nearest to each other, and copy. Within a `shard_map`: it cuts no such
    array.
    """
    found: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return found


@jax.custom_vjp
def with_gradient_in_order(x: jax.Array) -> jax.Array:
    """`x`, whose gradient lies in memory in the order of its axes (`in_order`), as it may not itself."""
    return x


with_gradient_in_order.defvjp(lambda x: (x, None), lambda _, gradient: (in_order(gradient),))


def kept(x: jax.Array) -> jax.Array:
    """`x`, which the backward pass finds with `remat: dots`, and so nothing that only leads to it.

    Of attention and of what is added to a matmul's result, on platforms where that is dearer to make than to keep.
    """
    return checkpoint_name(x, KEPT) if keeps_heads_apart() else x


def policy_of_dots() -> Callable[..., bool]:
    """What `remat: dots` keeps."""
    policies = jax.checkpoint_policies
    dots: Callable[..., bool] = policies.dots_with_no_batch_dims_saveable
    if not keeps_heads_apart():
        return dots
    found: Callable[..., bool] = policies.save_from_both_policies(dots, policies.save_only_these_names(KEPT))
    return found


def for_tpus(module: str) -> ModuleType:
    """A module of the kernels of TPUs, which are slow to import."""
    return importlib.import_module(module)
