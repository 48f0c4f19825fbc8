"""Devices that stand for NVIDIA GPUs, for which XLA for GPU compiles on a machine without any.

JAX's plugin for CUDA holds the compiler. It needs no CUDA library to compile, only a description of the GPU.

On a GPU, XLA times kernels to choose among them, unless the job is deterministic. Without one it would generate each
matmul by Triton. A deterministic job uses cuBLAS, whose results need memory of their own: of GPT-2 124M on an H200 (jax
0.11.2) 8.51 GiB are measured, 8.27 planned with cuBLAS, and 7.42 with Triton. So plans use cuBLAS.

A job on a GPU asks the GPU which forms of attention cuDNN has for it. Here the description answers.
"""

import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import jax
from jax.experimental import topologies

from runner.accelerator import DETERMINISTIC_FLAGS, GPU_PLUGINS, Accelerator, GpuProcessors, add_flags
from runner.errors import InvalidError
from runner.jax_internals import fused_attention_stablehlo
from runner.spec.imports import format_install, import_extra

_USE_CUBLAS = "--xla_gpu_enable_triton_gemm=false"
# Its last result is the workspace, which has no bytes unless XLA could ask cuDNN.
_ATTENTION_GRADIENT = re.compile(r'u8\[0\]\S* custom-call\(.*custom_call_target="__cudnn\$fmha\w*Backward".*')
# Of the scores: batch, heads of queries, queries, keys.
_SCORES = re.compile(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\["(\d+)", ?"(\d+)", ?"(\d+)", ?"(\d+)"\]')
_IS_DETERMINISTIC = re.compile(r'"force_deterministic": ?true')
_SMALL_WORKSPACE = 256 << 20
# Those that jax[cuda12] installs with the newest version of JAX that the runner is tested with. Compiling needs none.
_CUDA_VERSION, _CUDNN_VERSION = (12, 9, 0), (9, 10, 2)
# Packages of NVIDIA's libraries, for CUDA 12 and 13.
_CUDA_PACKAGES = ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime")
_CUDNN_PACKAGES = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")

Version = tuple[int, int, int]


@dataclass(frozen=True)
class CudaVersions:
    """Versions of the libraries that programs are compiled for."""

    cuda: Version
    cudnn: Version

    @classmethod
    def find(cls) -> "CudaVersions":
        """Return the versions that are installed here, or else those that JAX installs.

        Raises `InvalidError` if a GPU could not run the job with those that are installed.
        """
        found = cls(
            _find_version(_CUDA_PACKAGES) or _CUDA_VERSION,
            _find_version(_CUDNN_PACKAGES) or _CUDNN_VERSION,
        )
        for package in GPU_PLUGINS:
            plugin = None if find_spec(package) is None else import_extra(f"{package}._versions")
            # JAX itself ignores the patch version of cuDNN.
            if (
                plugin is not None
                and (built := plugin.cudnn_build_version()) // 100 > 100 * found.cudnn[0] + found.cudnn[1]
            ):
                needed = f"{built // 10_000}.{built // 100 % 100}"
                raise InvalidError(
                    f"cuDNN {_format_version(found.cudnn)} is installed, and JAX {jax.__version__} needs {needed} or "
                    f"newer on a GPU; {format_install('cuda')}"
                )
        return found

    def __str__(self) -> str:
        """Return what differs from the versions that JAX installs, as the end of a clause; nothing otherwise."""
        if self == CudaVersions(_CUDA_VERSION, _CUDNN_VERSION):
            return ""
        return f" with CUDA {_format_version(self.cuda)} and cuDNN {_format_version(self.cudnn)}, as installed"


def is_gpu_compiler_installed() -> bool:
    """Return True if JAX's plugin for CUDA can be imported."""
    return any(find_spec(package) is not None for package in GPU_PLUGINS)


def add_gpu_flags(variables: MutableMapping[str, str], *, is_deterministic: bool) -> None:
    """Add the flags of XLA for such programs to `XLA_FLAGS`. Call it before JAX starts a backend."""
    add_flags(variables, [*(DETERMINISTIC_FLAGS["gpu"] if is_deterministic else ()), _USE_CUBLAS])


def open_gpu_devices(accelerator: Accelerator) -> tuple[Sequence[jax.Device], str]:
    """Return devices to compile for, and the name of the compiler. Raises InvalidError if it knows no such GPU.

    From then on JAX's attention takes the GPUs of this process for those of `accelerator`.
    """
    chip = accelerator.chip
    assert chip.processors is not None, "the caller has asked whether it is a GPU"
    assert chip.speeds is not None, "every GPU of the catalogue has peak rates"
    shape = f"{accelerator.num_slices}x{accelerator.hosts_per_slice}x{accelerator.num_chips_per_host}"
    versions = CudaVersions.find()
    target = describe_gpu(chip.processors, int(chip.speeds.hbm_bytes_per_second), versions)
    try:
        topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=target, topology=shape)
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        line = str(error).split("\n", 1)[0][:300]
        raise InvalidError(f"XLA for GPU of jax {jax.__version__} cannot compile for {accelerator}: {line}") from error
    _answer_for_gpu(chip.processors.compute_capability, versions.cudnn)
    return topology.devices, f"XLA for GPU of jax {jax.__version__}{versions}"


def describe_gpu(gpu: GpuProcessors, bytes_per_second: int, versions: CudaVersions) -> str:
    """Return the text of a `GpuTargetConfigProto` (openxla/xla, xla/stream_executor/device_description.proto)."""
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": gpu.shared_memory_bytes,
        "threads_per_core_limit": gpu.threads_per_processor,
        "core_count": gpu.num_processors,
        "fpus_per_core": gpu.units_per_processor,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": bytes_per_second,
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory_bytes,
        "shared_memory_per_block_optin": gpu.shared_memory_bytes - 1024,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    major, minor = gpu.compute_capability
    cudnn, cuda = ("major: {} minor: {} patch: {}".format(*each) for each in (versions.cudnn, versions.cuda))
    return (
        f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ {cudnn} }} runtime_version {{ {cuda} }} '
        f'device_description_str: "{gpu.name}"'
    )


def count_attention_workspace(text: str, accelerator: Accelerator | None) -> int:
    """Return the bytes that cuDNN needs, at most, beside the arrays of a program that was compiled without a GPU.

    On Hopper, up to cuDNN 9.24, the gradient of attention that has the same bits each time writes the gradient of every
    score: 16 bits for each pair of positions and head of queries, both rounded up to 64. Otherwise cuDNN does so where
    this takes at most 256 MiB (NVIDIA/cudnn-frontend, pull request 398). Calls of one program run one after another.
    """
    gpu = None if accelerator is None else accelerator.chip.processors
    if gpu is None or gpu.compute_capability != (9, 0):
        return 0
    sizes = [0]
    for call in _ATTENTION_GRADIENT.findall(text):
        if scores := _SCORES.search(call):
            batch, heads, queries, keys = map(int, scores.groups())
            size = 2 * batch * heads * (queries + -queries % 64) * (keys + -keys % 64)
            if _IS_DETERMINISTIC.search(call) or size <= _SMALL_WORKSPACE:
                sizes.append(size)
    return max(sizes)


def _answer_for_gpu(compute_capability: tuple[int, int], cudnn: Version) -> None:
    """Have JAX's attention for cuDNN take the GPU for one of this capability, for the rest of this process."""
    major, minor, patch = cudnn

    def parse(capability: str) -> tuple[int, ...]:
        return tuple(map(int, capability.split(".")))

    answers = {
        "check_cudnn_version": lambda: 10_000 * major + 100 * minor + patch,
        "check_compute_capability": lambda capability: compute_capability >= parse(capability),
        "is_cuda_compute_capability_equal": lambda capability: compute_capability == parse(capability),
    }
    for name, answer in answers.items():
        setattr(fused_attention_stablehlo, name, answer)


def _find_version(packages: Sequence[str]) -> Version | None:
    """Return the first three numbers of the version of the first package that is installed; None if there is none."""
    for package in packages:
        try:
            numbers = [int(number) for number in re.findall(r"\d+", metadata.version(package))][:3]
        except metadata.PackageNotFoundError:
            continue
        major, minor, patch = [*numbers, 0, 0, 0][:3]
        return major, minor, patch
    return None


def _format_version(version: Version) -> str:
    return ".".join(map(str, version))
