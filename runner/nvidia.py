"""NVIDIA GPUs of this host: their driver, other processes on them, and their errors as JAX raises them.

JAX raises the errors of XLA, CUDA and NCCL as `RuntimeError`, and only the message says what has failed.
`explain_gpu_error` sorts them by what a scheduler should do:

- 76, and another host may help: a GPU or its link has failed, NCCL has lost its connection, the memory of a GPU is held
  by another process, or the GPUs cannot be opened for another reason. The memory is usually that of a process that is
  about to end, such as one of the attempt before, so a restart is better than a person.
- 2, because every restart would end in the same way: the driver is too old, or a library of CUDA is missing.
- Any other error, such as a program that needs more memory than a GPU has, keeps its exit code.

The messages are those of openxla/xla (`stream_executor/cuda/cuda_status.cc`, `backends/gpu/collectives/nccl_errors.h`),
of CUDA (`cuGetErrorName` and `cuGetErrorString`), and of JAX's plugin (`jax_plugins/xla_cuda12/__init__.py`).
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from runner.accelerator import GPU_PLUGINS, has_device
from runner.errors import DeviceError, InvalidError, RetryableError, RunnerError
from runner.process import read_node_name
from runner.spec.imports import format_install, import_extra

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DEVICES = ("nvidia0", "nvidiactl", "dxg")  # files below /dev by which JAX looks for NVIDIA GPUs
_MIN_DRIVERS = {"13": (580,), "12": (525, 60, 13)}  # by CUDA's version, as JAX and NVIDIA's release notes list them
_MIN_HELD_BYTES = 2**30  # less is that of a monitor, or of a display
_JAX_LOGGER = "jax._src.xla_bridge"

# Kinds of errors, each with patterns of its messages. The first kind that matches decides.
DRIVER, LIBRARY, NO_GPU, FAULT, NETWORK, OTHER = "driver", "library", "no GPU", "fault", "network", "other"
_PATTERNS = {
    DRIVER: r"driver version is insufficient|CUDA_ERROR_(?:SYSTEM_DRIVER_MISMATCH|UNSUPPORTED_PTX_VERSION|"
    r"COMPAT_NOT_SUPPORTED_ON_DEVICE)",
    LIBRARY: r"Unable to load \w+\. Is it installed|Outdated \w+ installation|Unable to load NCCL library|"
    r"cuDNN (?:< 9|9\.10\.0 had)|DNN library initialization failed",
    NO_GPU: r"CUDA_ERROR_NO_DEVICE|Invalid device ordinal value|CUDA error 303|UNKNOWN ERROR \(303\)",
    FAULT: r"CUDA_ERROR_(?:ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|HARDWARE_STACK_ERROR|CONTAINED)|"
    r"fallen off the bus|GPU is lost|uncorrectable (?:ECC|NVLink) error",
    NETWORK: r"NCCL operation .* failed: (?:unhandled (?:system|cuda) error|remote process exited|internal error)|"
    r"async NCCL error|NcclCommunicator (?:aborted|cancelled)|Clique key .* is stale",
    OTHER: r"CUDA_ERROR_(?:LAUNCH_FAILED|LAUNCH_TIMEOUT|SYSTEM_NOT_READY|DEVICE_UNAVAILABLE|EXTERNAL_DEVICE|"
    r"DEINITIALIZED)|"
    r"Unable to initialize backend 'cuda'|no supported devices found for platform CUDA",
}
_ORDINAL = re.compile(r"device ordinal:? (\d+)|\bCUDA:(\d+)|\bGPU (\d+)")


class GpuFaultError(DeviceError):
    """A GPU, its driver's state or its link has failed.

    Attributes:
        ordinal: number of the GPU among those of this process; None if the message does not tell.
    """

    ordinal: int | None = None


@contextlib.contextmanager
def gpu_errors() -> Iterator[None]:
    """Raise the error of `explain_gpu_error` in place of JAX's, if there is one."""
    try:
        yield
    except RuntimeError as error:
        explained = explain_gpu_error(error)
        if explained is None:
            raise
        raise explained from error


def classify_gpu_error(error: BaseException) -> str | None:
    """Return the kind of an error of JAX, or None if it is not one of GPUs or has an exit code already."""
    if not isinstance(error, RuntimeError) or isinstance(error, RunnerError):
        return None
    return next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, str(error))), None)


def explain_gpu_error(error: BaseException) -> RunnerError | None:
    """Return the error of the runner for an error of JAX; None if the host is not its cause."""
    kind, text, host = classify_gpu_error(error), str(error), read_node_name()
    is_memory = isinstance(error, RuntimeError) and ("RESOURCE_EXHAUSTED" in text or "CUDA_ERROR_OUT_OF_MEMORY" in text)
    # Without memory for its handle, cuDNN too fails to start.
    if (is_memory or kind in (LIBRARY, OTHER)) and (holders := find_holders()):
        return RetryableError(
            f"{host}: {'; '.join(holders)}, which this job needs; end it, or run the same command again when it is gone"
        )
    if kind is None:
        return None
    line = _find_line(text, _PATTERNS[kind])
    driver = describe_driver()
    if kind == DRIVER or (kind in (LIBRARY, OTHER) and is_driver_too_old()):
        return InvalidError(
            f"{host}: {driver}: {line}; update the driver of this host, or keep the job off it (--exclude {host})"
        )
    if kind == LIBRARY:
        return InvalidError(f"{host}: {line}; the libraries come with JAX: {format_install('cuda')}")
    if kind == NO_GPU:
        return InvalidError(f"{host}: {line}; {_describe_visible()}")
    if kind == NETWORK:
        return RetryableError(
            f"{host}: NCCL lost its connections: {line}; run the same command again, with NCCL_DEBUG=INFO if it returns"
        )
    if kind == OTHER:
        return RetryableError(f"{host}: its GPUs cannot be used ({driver}): {line}; run the same command again")
    ordinal = _ORDINAL.search(text)
    number = None if ordinal is None else int(next(filter(None, ordinal.groups())))
    gpu = "a GPU" if number is None else f"GPU {number}"
    fault = GpuFaultError(
        f"{host}: {gpu} failed: {line}; run the same command again, and keep the host out if it returns"
    )
    fault.ordinal = number
    return fault


def _find_line(text: str, pattern: str) -> str:
    """Return the part of the message that the pattern matches, as one line."""
    lines = text.splitlines()
    found = next((line for line in lines if re.search(pattern, line)), lines[0])
    # A message of several lines says only below which version was found and which is needed.
    versions = [line for line in lines if line.startswith(("Minimum supported:", "Installed version:"))]
    return ", ".join([found.strip()[:300].rstrip("."), *map(str.lower, versions)])


# The driver.


def read_driver_version() -> tuple[int, ...] | None:
    """Return the version of NVIDIA's driver on this host; None if it has none."""
    try:
        found = re.search(
            r"(?:Kernel Module|x86_64|aarch64)\s+(?:for \w+\s+)?(\d+(?:\.\d+)+)", _DRIVER_FILE.read_text()
        )
    except OSError:
        return None
    return None if found is None else tuple(map(int, found[1].split(".")))


def find_needed_driver() -> tuple[str, tuple[int, ...]] | None:
    """Return the version of CUDA of JAX's plugin, and the oldest driver for it; None without a plugin."""
    found = [package.removeprefix("jax_cuda")[:2] for package in GPU_PLUGINS if find_spec(package) is not None]
    return (found[-1], _MIN_DRIVERS[found[-1]]) if found else None


def is_driver_too_old() -> bool:
    """Return True if the driver of this host is known, and older than JAX's plugin needs."""
    version, needed = read_driver_version(), find_needed_driver()
    return version is not None and needed is not None and version < needed[1]


def describe_driver() -> str:
    """Return the driver of this host, and the one that JAX's plugin needs, as one clause."""
    version, needed = read_driver_version(), find_needed_driver()
    found = "it has no NVIDIA driver" if version is None else f"its NVIDIA driver is {_format_version(version)}"
    return found if needed is None else f"{found}, and CUDA {needed[0]} needs {_format_version(needed[1])} or newer"


def _format_version(version: Sequence[int]) -> str:
    return ".".join(f"{part:02d}" if place else str(part) for place, part in enumerate(version))


# GPUs, and who uses them.


def has_nvidia_gpu() -> bool:
    """Return True if this host has an NVIDIA GPU that JAX would look at."""
    return has_device(_DEVICES)


def _describe_visible() -> str:
    """Return why this process may see no GPU, or not the one that it should use, as one clause."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if read_driver_version() is None:
        return describe_driver()
    if visible is None:
        return "check nvidia-smi, and the devices of the job's container"
    return f"CUDA_VISIBLE_DEVICES is {visible!r}; give each process the GPUs that it should use"


def open_gpus(pynvml: Any, numbers: Sequence[int] | None = None) -> list[Any]:
    """Return NVML's handles of GPUs by their numbers among the visible ones, by default of all visible ones.

    Raises `pynvml.NVMLError`, or `IndexError` for a number beyond the visible ones.
    """
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    pynvml.nvmlInit()  # each call after the first counts a reference
    if numbers is None:
        names = visible or [str(number) for number in range(pynvml.nvmlDeviceGetCount())]
    else:
        names = [visible[number] if visible else str(number) for number in numbers]
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def find_holders() -> list[str]:
    """Return a clause for each GPU of this process of which other processes hold memory.

    There is none if the driver does not tell. A process id of another numbering, as that of a container's host, means
    nothing here, and is left out.
    """
    # One of several processes of a host uses some of the visible GPUs, and the others hold memory of theirs.
    own = str(jax.config.values["jax_cuda_visible_devices"])
    numbers = list(map(int, own.split(","))) if re.fullmatch(r"[\d,]+", own) else None
    try:
        pynvml = import_extra("pynvml")
    except InvalidError:
        return []
    found = []
    try:
        for number, handle in enumerate(open_gpus(pynvml, numbers)):
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            others = [each for each in processes if each.pid != os.getpid() and Path(f"/proc/{each.pid}").exists()]
            held = sum(each.usedGpuMemory or 0 for each in others)
            if held >= _MIN_HELD_BYTES:
                total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
                ids = ", ".join(str(each.pid) for each in others[:4])
                place = number if numbers is None else numbers[number]
                found.append(f"process {ids} holds {held / 2**30:.1f} of {total / 2**30:.1f} GiB of GPU {place}")
    except (pynvml.NVMLError, IndexError):
        return []
    return found


# JAX continues on CPUs if its plugin for GPUs does not start.


class _PluginProblems(logging.Filter):
    """Filter of JAX's logger that keeps why it runs on CPUs, in place of a traceback on the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or "plugin configuration error" not in str(record.msg):
            return "NVIDIA GPU may be present" not in str(record.msg)
        self.errors.append(error)
        return False


_problems = _PluginProblems()


def watch_plugins() -> None:
    """Keep the errors of JAX's plugins from now on. Call it before JAX starts a backend."""
    logging.getLogger(_JAX_LOGGER).addFilter(_problems)


def explain_missing_gpus() -> str | None:
    """Return why JAX runs on CPUs although this host has an NVIDIA GPU, as one clause; None if it has none."""
    if not has_nvidia_gpu() or os.environ.get("JAX_PLATFORMS") == "cpu":
        return None
    for error in _problems.errors:
        explained = explain_gpu_error(error)
        return str(explained) if explained is not None else f"{read_node_name()}: {str(error).splitlines()[0][:300]}"
    if find_needed_driver() is None:
        return f"{read_node_name()}: JAX's plugin for CUDA is not installed: {format_install('cuda')}"
    return f"{read_node_name()}: JAX's plugin for CUDA found no GPU ({describe_driver()})"
