"""Parts of JAX that are not public, each with a check, so that a version without one is reported in one line.

- `clusters`: detection of the processes of a job from the environment of an engine
- `compilation_cache`, `compiler`: the compile cache of a run's directory takes the place of JAX's own
- `distributed`: the coordinator's client, whose key-value store the agreement of the processes uses
- `fused_attention_stablehlo`: cuDNN's attention is asked for its deterministic algorithm
- `tpu`: MLIR dialect of TPU kernels, to read the programs of kernels
"""

from importlib import import_module, metadata
from typing import Any

from runner.errors import InvalidError

# Module and attribute, each used in one place.
_NEEDED = (
    ("clusters", "SlurmCluster"),
    ("compilation_cache", "get_file_cache"),
    ("compiler", "_cache_write"),
    ("distributed", "global_state"),
    ("cudnn.fused_attention_stablehlo", "dot_product_attention"),
    ("lib", "tpu"),
)


def _load(module: str, attribute: str) -> Any:
    """Import a module of `jax._src`. Raises `InvalidError` if it or its attribute is missing."""
    try:
        found = import_module(f"jax._src.{module}")
    except ImportError as error:
        found, reason = None, str(error)
    else:
        reason = f"jax._src.{module} has no {attribute}"
    if found is None or not hasattr(found, attribute):
        raise InvalidError(
            f"jax {metadata.version('jax')} does not work with this version of the runner: {reason}; install another "
            "version of jax, or a newer runner"
        )
    return found


clusters, compilation_cache, compiler, distributed, fused_attention_stablehlo, _lib = (_load(*each) for each in _NEEDED)
tpu = _lib.tpu
