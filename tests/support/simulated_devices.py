"""Simulated CPU devices of the pytest process and of the processes that tests start."""

import mmap
import os
from importlib.util import find_spec
from pathlib import Path

from runner.process import make_environment

# Compilation dominates the cost of these tests. LLVM's optimiser takes half of it, and XLA's newer emitters of fused
# loops half of the rest, so both are disabled; the older emitters compute the same.
_UNOPTIMIZED = "--xla_backend_optimization_level=0"
_EMITTERS = "xla_cpu_use_fusion_emitters"
# XLA compiles the code of a program in parts, by default 32, which takes a third more CPU time than one part. Snapshots
# keep to the default, on which their bits depend.
_PARTS = "xla_cpu_parallel_codegen_split_count"


def _is_known(flag: str) -> bool:
    """Report whether the installed XLA has a flag of this name; an unknown one in XLA_FLAGS aborts the process."""
    package = find_spec("jaxlib")
    folders = [] if package is None else package.submodule_search_locations or []
    for path in (Path(folder) / "libjax_common.so" for folder in folders):
        if path.is_file():
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                # A whole C string: the descriptors of protocol buffers also hold the names of flags that are gone.
                return content.find(b"\0" + flag.encode() + b"\0") >= 0
    return False


_HAS_EMITTERS, _HAS_PARTS = _is_known(_EMITTERS), _is_known(_PARTS)
FAST_COMPILATION = " ".join([_UNOPTIMIZED, *([f"--{_EMITTERS}=false"] if _HAS_EMITTERS else [])])  # for XLA_FLAGS
# Compiler options of a user's process, for tests that need the bits that users get.
USER_COMPILER_OPTIONS: dict[str, int] = {"xla_backend_optimization_level": 3}
USER_COMPILER_OPTIONS |= ({_EMITTERS: True} if _HAS_EMITTERS else {}) | ({_PARTS: 32} if _HAS_PARTS else {})


def configure_simulated_devices(devices: int) -> None:
    """Give this process and its children `devices` simulated CPU devices; call it before jax is imported."""
    flags = f"{FAST_COMPILATION} --{_PARTS}=1" if _HAS_PARTS else FAST_COMPILATION
    os.environ.update(make_environment(devices, {"XLA_FLAGS": flags}))


def environment(devices: int, cache: Path | None = None) -> dict[str, str]:
    """Return the environment of a process with `devices` simulated CPU devices, independent of this process's."""
    # NPROC limits the threads of this process's own devices.
    given = {name: value for name, value in os.environ.items() if name != "NPROC"}
    variables = make_environment(devices, given) | {"PYTHONUNBUFFERED": "1"}
    return variables if cache is None else variables | {"RUNNER_CACHE": str(cache)}
