"""Parts of JAX that are not public, each with a check, so that a version without one is reported in one line.

- `clusters`: detection of the processes of a job from the environment of an engine
- `compilation_cache`, `compiler`: the compile cache of a run's directory takes the place of JAX's own
- `distributed`: the coordinator's client, whose key-value store the agreement of the processes uses
- `fused_attention_stablehlo`: cuDNN's attention is asked for its deterministic algorithm, and compiled without a GPU
- `tpu`: MLIR dialect of TPU kernels, to read the programs of kernels
- `xla_bridge`: plugins are loaded before a backend starts
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

from runner.errors import InvalidError


def _make_error(reason: str) -> InvalidError:
    return InvalidError(
        f"jax {metadata.version('jax')} does not work with this version of the runner: {reason}; install another "
        "version of jax, or a newer runner"
    )


try:
    from jax._src import clusters, compilation_cache, compiler, distributed, xla_bridge
    from jax._src.cudnn import fused_attention_stablehlo
    from jax._src.lib import tpu
except ImportError as _error:
    raise _make_error(str(_error)) from _error

# Functions that ask the GPU of this machine.
CUDNN_CHECKS = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
_DISCOVER = "_discover_and_register_pjrt_plugins"
NEEDED: tuple[tuple[ModuleType, str], ...] = (
    (clusters, "SlurmCluster"),
    (compilation_cache, "get_file_cache"),
    (compiler, "_cache_write"),
    (distributed, "global_state"),
    (fused_attention_stablehlo, "dot_product_attention"),
    *((fused_attention_stablehlo, name) for name in CUDNN_CHECKS),
    (tpu, "register_dialect"),
    (xla_bridge, _DISCOVER),
)
for _module, _name in NEEDED:
    if not hasattr(_module, _name):
        raise _make_error(f"{_module.__name__} has no {_name}")


def discover_plugins() -> None:
    """Load the plugins of JAX for hardware, which their first use would do otherwise."""
    getattr(xla_bridge, _DISCOVER)()


_omits_mask_gradients = contextvars.ContextVar("omits_mask_gradients", default=False)
_HAS_MASK_GRADIENT = "should_export_dbias"


@contextlib.contextmanager
def omit_mask_gradients() -> Iterator[None]:
    """Have cuDNN's attention, traced in this context, compute no gradient of its mask.

    JAX before 0.11 asks for the gradient of every mask. It costs time, and with it not every GPU has an algorithm that
    gives the same bits twice.
    """
    ask = getattr(fused_attention_stablehlo, _HAS_MASK_GRADIENT, None)
    if ask is not None and not hasattr(ask, "__wrapped__"):

        @functools.wraps(ask)
        def has_gradient(*args: Any) -> bool:
            return not _omits_mask_gradients.get() and ask(*args)

        setattr(fused_attention_stablehlo, _HAS_MASK_GRADIENT, has_gradient)
    token = _omits_mask_gradients.set(True)
    try:
        yield
    finally:
        _omits_mask_gradients.reset(token)
