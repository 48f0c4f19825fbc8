"""Catalogue of accelerator chips: peak rates, hosts, and the names that devices and job engines give them.

A spec names chips: `v5e-16` is one slice of 16 chips, `2xv5e-256` two slices of 256, `h200-8` 8 GPUs. This module is
the only one that knows chips. It imports no jax.

Rates are those of the makers, per chip: the pages of the Google Cloud documentation on each TPU version
(docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e, /tpu7x) and NVIDIA's data sheets of the DGX A100 80GB, H100, H200
and B200. The makers publish the bandwidth of interconnects for both directions together; the catalogue has one
direction, half of that. Rates in 8 bits are from the same pages, without sparsity: "Int8" of v5e, v5p and v6e, "fp8" of
tpu7x; v4 multiplies int8 as fast as bfloat16, so it has none here. Names are those of "Plan TPUs in GKE", "TPU software
versions" (same documentation) and libtpu. Figures of the processors of a GPU are those that its driver reports, as
OpenXLA publishes them (openxla/xla, xla/backends/gpu/target_config/specs); those of L40S are from NVIDIA's white paper
on the Ada architecture, and its memory is assumed.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.errors import InvalidError

TPU_DEVICES = ("accel*", "vfio/*")  # files below /dev
GPU_DEVICES = ("nvidia*", "kfd")  # of NVIDIA and of AMD
ACCELERATOR_DEVICES = (*TPU_DEVICES, *GPU_DEVICES)
GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # packages of JAX for NVIDIA GPUs, by version of CUDA
HOST_MEMORY = "pinned_host"  # jax's name of host memory that TPUs and GPUs read and write directly

# Chips of a slice -> its shape, as GKE labels nodes and libtpu names topologies.
_TORUS_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_TORUS_3D = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
    4096: "16x16x16",
}


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of one chip, without sparsity."""

    flops_per_second: float  # floating-point operations per second in bfloat16
    hbm_bytes: int  # size of its memory
    hbm_bytes_per_second: float  # bandwidth of its memory
    # Bandwidth out of one chip over all its links inside a slice, or inside a GPU node, in one direction.
    interconnect_bytes_per_second: float
    network_bytes_per_second: float  # the chip's share of its host's network between slices or nodes, in one direction
    int8_per_second: float | None = None  # operations per second on int8; None if it has none, or no faster ones
    float8_per_second: float | None = None  # operations per second on float8, likewise

    def get_matmul_rate(self, matmul: str) -> float | None:
        """Return the operations per second of matmuls by `precision.matmul`; None if the chip has no such matmuls."""
        return {"int8": self.int8_per_second, "float8": self.float8_per_second}.get(matmul, self.flops_per_second)


@dataclass(frozen=True)
class GpuProcessors:
    """Processors of a GPU, as XLA for GPU needs to know them to compile for it."""

    name: str  # name that its driver reports
    compute_capability: tuple[int, int]
    num_processors: int  # streaming multiprocessors
    units_per_processor: int  # of float32
    shared_memory_bytes: int  # of a processor; a program may use 1 KiB less
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int  # device memory that the driver reports
    threads_per_processor: int = 2048


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator."""

    device_kinds: tuple[str, ...]  # prefixes of `device_kind` of its jax devices, in lower case
    speeds: PeakRates | None = None  # peak rates; None if they depend on the machine
    # Chips of one host of a slice with several hosts, or of one GPU node; None if it varies.
    chips_per_host: int | None = None
    devices_per_chip: int = 1  # number of jax devices of one chip
    # Chips of a slice -> shape of the slice, as GKE and libtpu write it; None unless it is a TPU.
    shapes: dict[int, str] | None = None
    libtpu_name: str | None = None  # prefix of libtpu's topology names; None unless it is a TPU
    gke_accelerator: str | None = None  # value of GKE's node label; None if GKE does not offer it
    gcloud_prefix: str | None = None  # prefix of the accelerator types of queued resources; None if there are none
    gcloud_units_per_chip: int = 1  # units per chip in the number of such a type, which counts cores for some chips
    gcloud_runtime: str | None = None  # software version of its TPU VMs for JAX
    # Number of matrix units of a chip, and the width of each; None if unknown. A unit of width 128 does 128 x 128
    # multiplications and additions per cycle. The makers publish no clock: `clock_hertz` follows from these and the
    # peak.
    matrix_units: tuple[int, int] | None = None
    compiler_flags: tuple[str, ...] = ()  # XLA flags for programs on this chip (see `make_compiler_options`)
    processors: GpuProcessors | None = None  # None unless it is a GPU
    hosts_per_domain: int = 1  # hosts whose GPUs one fast interconnect joins

    @property
    def device_hbm_bytes(self) -> int:
        """Memory of one jax device, in bytes. Only for chips with known peak rates."""
        assert self.speeds is not None, "callers ask only for chips with known peak rates"
        return self.speeds.hbm_bytes // self.devices_per_chip

    @property
    def chips_per_domain(self) -> int | None:
        """Number of GPUs that one fast interconnect joins; None if it varies."""
        return None if self.chips_per_host is None else self.chips_per_host * self.hosts_per_domain

    @property
    def clock_hertz(self) -> float | None:
        """Cycles per second, derived from the peak of the matrix units."""
        if self.matrix_units is None or self.speeds is None:
            return None
        number, width = self.matrix_units
        return self.speeds.flops_per_second / (2 * number * width**2)

    @property
    def is_tpu(self) -> bool:
        """True if it comes in slices."""
        return self.shapes is not None

    @property
    def slice_sizes(self) -> list[int]:
        """Numbers of chips that can be requested, ascending: slices, or parts of a GPU node and whole nodes."""
        return sorted(self.shapes) if self.shapes is not None else [2**power for power in range(11)]


# By default libtpu makes every all-gather of parameters wait for the matmul before it. With these flags it overlaps the
# two: of the all-gathers of `specs/gpt_7b.yaml` on v5p-512, 43 ms a step, libtpu's own schedule hides all but 9.5 ms.
# Names and use are those of MaxText, benchmarks/xla_flags_library.py.
#
# Left out, because there is no gain or none was seen: `xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter` with
# `xla_enable_async_reduce_scatter_fusion` (libtpu runs out of fast memory on that spec), and all of these flags where
# only gradients cross chips, as with `data` on v5e. With a ragged all-to-all in the same program libtpu 0.0.42.1 dies
# of an internal error if all five flags are set.
_GATHERS_BESIDE_MATMULS = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)

# Fast memory that one op may use; the rest prefetches what later ops need. With this limit ops of `specs/gpt_7b.yaml`
# on v5p-512 use larger tiles: by libtpu's own estimates a step takes 917 ms instead of 1,079, and 907 with 96 MiB.
# There is no gain on v5e.
_LARGE_TILES = "--xla_tpu_scoped_vmem_limit_kib=32768"

_RAGGED = "ragged_all_to_all"

_T, _G, _GIB = 1e12, 1e9, 2**30

CHIPS = {
    "cpu": Chip(("cpu",)),
    "v4": Chip(
        ("tpu v4",),
        # Its network is not published; it is assumed to be that of v5p.
        PeakRates(275 * _T, 32 * _GIB, 1200 * _G, 300 * _G, 6.25 * _G),
        chips_per_host=4,
        shapes=_TORUS_3D,
        libtpu_name="v4",
        gke_accelerator="tpu-v4-podslice",
        gcloud_prefix="v4",
        gcloud_units_per_chip=2,
        gcloud_runtime="tpu-ubuntu2204-base",
        matrix_units=(8, 128),  # four in each of two cores
    ),
    "v5e": Chip(
        ("tpu v5 lite", "tpu v5e"),
        PeakRates(197 * _T, 16 * _GIB, 819 * _G, 200 * _G, 3.125 * _G, 394 * _T),
        chips_per_host=4,
        shapes=_TORUS_2D,
        libtpu_name="v5e",
        gke_accelerator="tpu-v5-lite-podslice",
        gcloud_prefix="v5litepod",
        gcloud_runtime="v2-alpha-tpuv5-lite",
        matrix_units=(4, 128),
    ),
    "v5p": Chip(
        ("tpu v5p", "tpu v5"),
        PeakRates(459 * _T, 95 * _GIB, 2765 * _G, 600 * _G, 6.25 * _G, 918 * _T),
        chips_per_host=4,
        shapes=_TORUS_3D,
        libtpu_name="v5p",
        gke_accelerator="tpu-v5p-slice",
        gcloud_prefix="v5p",
        gcloud_units_per_chip=2,
        gcloud_runtime="v2-alpha-tpuv5",
        matrix_units=(8, 128),  # four in each of two cores
        compiler_flags=(*_GATHERS_BESIDE_MATMULS, _LARGE_TILES),
    ),
    "v6e": Chip(
        ("tpu v6 lite", "tpu v6e"),
        PeakRates(918 * _T, 32 * _GIB, 1638 * _G, 400 * _G, 12.5 * _G, 1836 * _T),
        chips_per_host=4,
        shapes=_TORUS_2D,
        libtpu_name="v6e",
        gke_accelerator="tpu-v6e-slice",
        gcloud_prefix="v6e",
        gcloud_runtime="v2-alpha-tpuv6e",
        matrix_units=(4, 256),  # from libtpu's cycle counts of a large matmul
    ),
    "tpu7x": Chip(
        ("tpu7x", "tpu v7"),
        PeakRates(2307 * _T, 192 * _GIB, 7380 * _G, 600 * _G, 12.5 * _G, None, 4614 * _T),
        chips_per_host=4,
        devices_per_chip=2,
        shapes=_TORUS_3D,
        libtpu_name="tpu7x",
        gke_accelerator="tpu7x",
        matrix_units=(8, 256),  # assumed to be those of v6e in each of its two devices
    ),
    "a100": Chip(
        ("nvidia a100",),
        PeakRates(312 * _T, 80 * 10**9, 2039 * _G, 300 * _G, 25 * _G, 624 * _T),
        chips_per_host=8,
        gke_accelerator="nvidia-a100-80gb",
        processors=GpuProcessors("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167936, 1.41, 41943040, 85100068864),
    ),
    "h100": Chip(
        ("nvidia h100",),
        PeakRates(989 * _T, 80 * 10**9, 3350 * _G, 450 * _G, 50 * _G, 1979 * _T, 1979 * _T),
        chips_per_host=8,
        gke_accelerator="nvidia-h100-80gb",
        processors=GpuProcessors("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233472, 1.98, 52428800, 84942979072),
    ),
    "h200": Chip(
        ("nvidia h200",),
        PeakRates(989 * _T, 141 * 10**9, 4800 * _G, 450 * _G, 50 * _G, 1979 * _T, 1979 * _T),
        chips_per_host=8,
        gke_accelerator="nvidia-h200-141gb",
        processors=GpuProcessors("NVIDIA H200", (9, 0), 132, 128, 233472, 1.98, 52428800, 151397597184),
    ),
    "b200": Chip(
        ("nvidia b200",),
        PeakRates(2250 * _T, 180 * 10**9, 8000 * _G, 900 * _G, 50 * _G, 4500 * _T, 4500 * _T),
        chips_per_host=8,
        gke_accelerator="nvidia-b200",
        processors=GpuProcessors("NVIDIA B200", (10, 0), 148, 128, 233472, 1.965, 132644864, 191514411008),
    ),
    "gb200": Chip(
        ("nvidia gb200",),
        PeakRates(2500 * _T, 186 * 10**9, 8000 * _G, 900 * _G, 50 * _G, 5000 * _T, 5000 * _T),
        chips_per_host=4,
        gke_accelerator="nvidia-gb200",
        processors=GpuProcessors("NVIDIA GB200", (10, 0), 152, 128, 233472, 2.062, 135528448, 197897748480),
        hosts_per_domain=18,
    ),
    "gb300": Chip(
        ("nvidia gb300",),
        PeakRates(2500 * _T, 279 * 10**9, 8000 * _G, 900 * _G, 100 * _G, None, 5000 * _T),
        chips_per_host=4,
        gke_accelerator="nvidia-gb300",
        processors=GpuProcessors("NVIDIA GB300", (10, 3), 152, 128, 233472, 2.07, 135528448, 297021079552),
        hosts_per_domain=18,
    ),
    "l40s": Chip(
        ("nvidia l40s",),
        # Its servers differ. It is assumed to have a PCIe 4.0 slot of 16 lanes, and a network card of 200 Gbit/s for
        # two GPUs.
        PeakRates(362 * _T, 48 * 10**9, 864 * _G, 32 * _G, 12.5 * _G, 733 * _T, 733 * _T),
        chips_per_host=8,
        processors=GpuProcessors("NVIDIA L40S", (8, 9), 142, 128, 102400, 2.52, 100663296, 47_700_000_000, 1536),
    ),
}

# Names of the catalogue by further names that Google uses. Their numbers count chips, too.
_OTHER_NAMES = {"v5litepod": "v5e", "trillium": "v6e", "ironwood": "tpu7x", "v7x": "tpu7x"}


# XLA flags with which a program gives the same bits at every start, by JAX platform. On a GPU, XLA chooses kernels by
# timing them at each compilation, and scatters and the gradient of fused attention add in the order in which threads
# arrive. `xla_gpu_deterministic_ops` excludes both ("Guarantees run-to-run determinism", openxla/xla, xla.proto and
# docs/determinism.md). CPUs and TPUs have no such choice.
DETERMINISTIC_FLAGS: dict[str, tuple[str, ...]] = {"cpu": (), "tpu": (), "gpu": ("--xla_gpu_deterministic_ops=true",)}
_GPU_DETERMINISM = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")  # either has XLA do it
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # drivers of NVIDIA, of AMD, and of either under WSL


def has_gpu(variables: Mapping[str, str]) -> bool:
    """Return True if JAX might run on a GPU here, as far as that is known without starting it."""
    platforms = variables.get("JAX_PLATFORMS", "")
    if platforms and not {"gpu", "cuda", "rocm"} & set(platforms.split(",")):
        return False
    return any(Path(file).exists() for file in _GPU_FILES)


@contextlib.contextmanager
def platform_errors() -> Iterator[None]:
    """Raise `InvalidError` instead of JAX's error about a platform in `JAX_PLATFORMS` that it does not know."""
    try:
        yield
    except RuntimeError as error:
        line = str(error).split("\n", 1)[0]
        if "is not in the list of known backends" not in line:
            raise
        raise InvalidError(f"environment: {line[:500]}") from error


def add_deterministic_flags(variables: MutableMapping[str, str]) -> None:
    """Add `DETERMINISTIC_FLAGS` to `XLA_FLAGS`, except flags that are already there. Call it before JAX starts."""
    add_flags(variables, DETERMINISTIC_FLAGS["gpu" if has_gpu(variables) else "cpu"])


def add_flags(variables: MutableMapping[str, str], flags: Sequence[str]) -> None:
    """Add flags to `XLA_FLAGS`, except those that are already there."""
    present = variables.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in present}
    if missing := [flag for flag in flags if flag.partition("=")[0] not in names]:
        variables["XLA_FLAGS"] = " ".join([*present, *missing])


def is_gpu_deterministic(variables: Mapping[str, str]) -> bool:
    """Return True if `XLA_FLAGS` asks for programs that give the same bits at every start on a GPU."""
    flags = variables.get("XLA_FLAGS", "").split()
    return any(f"{name}=true" in flags or name in flags for name in _GPU_DETERMINISM)


def make_compiler_options(device_kind: str, variables: Mapping[str, str], program: str) -> dict[str, str | bool]:
    """Return the catalogue's XLA flags for a program (StableHLO), as options of its compilation.

    A flag that is set in `LIBTPU_INIT_ARGS` or `XLA_FLAGS` is left out, so that the user's value has precedence.
    Programs that crash the compiler with these flags get none.
    """
    chip = None if _RAGGED in program else find_chip(device_kind)
    given = f"{variables.get('LIBTPU_INIT_ARGS', '')} {variables.get('XLA_FLAGS', '')}".split()
    names = {flag.partition("=")[0] for flag in given}
    flags = [flag.removeprefix("--").partition("=") for flag in (chip.compiler_flags if chip else ())]
    # Compile options of XLA must be booleans, not the strings "true" and "false".
    booleans: dict[str, str | bool] = {"true": True, "false": False}
    return {name: booleans.get(value, value) for name, _, value in flags if f"--{name}" not in names}


@dataclass(frozen=True)
class Accelerator:
    """Accelerator for which a job is sized."""

    name: str  # name of the chip in the catalogue
    num_chips: int | None = None  # chips per slice; None for as many as there are
    num_slices: int = 1

    def __str__(self) -> str:
        """Return the accelerator as a spec names it."""
        slices = f"{self.num_slices}x" if self.num_slices > 1 else ""
        return f"{slices}{self.name}" + ("" if self.num_chips is None else f"-{self.num_chips}")

    @property
    def chip(self) -> Chip:
        """Entry in the catalogue."""
        return CHIPS[self.name]

    @property
    def num_devices(self) -> int | None:
        """Number of jax devices of the whole job; None for as many as there are."""
        return None if self.num_chips is None else self.num_slices * self.num_chips * self.chip.devices_per_chip

    @property
    def shape(self) -> str:
        """Shape of one slice, such as 4x4. Raises `InvalidError` if there is no slice with this number of chips."""
        shapes = self.chip.shapes or {}
        if self.num_chips not in shapes:
            near = ", ".join(f"{self.name}-{number}" for number in shapes) or "none"
            raise InvalidError(f"{self.name} has no slice of {self.num_chips} chips; slices: {near}")
        return shapes[self.num_chips]

    @property
    def hosts_per_slice(self) -> int:
        """Number of hosts of one slice, or of GPU nodes. A TPU slice of up to 4 chips is one host."""
        if self.num_chips is None or self.chip.chips_per_host is None:
            return 1
        return -(-self.num_chips // self.chip.chips_per_host)

    @property
    def num_chips_per_host(self) -> int | None:
        """Number of chips of each host of the job; None for as many as there are."""
        return None if self.num_chips is None else self.num_chips // self.hosts_per_slice

    def matches(self, device_kind: str, num_devices: int) -> bool:
        """Return True if devices of this kind and number are those of this accelerator."""
        return find_chip(device_kind) == self.chip and self.num_devices in (None, num_devices)


def find_chip(device_kind: str) -> Chip | None:
    """Return the chip whose jax devices have this `device_kind`; None if the catalogue does not know it."""
    kind = device_kind.lower()
    found = [(len(prefix), chip) for chip in CHIPS.values() for prefix in chip.device_kinds if kind.startswith(prefix)]
    # Prefixes overlap, as "tpu v5" and "tpu v5 lite" do; the longest one decides.
    return max(found, key=lambda pair: pair[0])[1] if found else None


def validate_matmul(matmul: str, chip: Chip | None) -> None:
    """Raise `InvalidError` if a chip lacks the matmuls of `precision.matmul`. A CPU emulates them."""
    if chip is None or chip.speeds is None or chip.speeds.get_matmul_rate(matmul) is not None:
        return
    (chip_name,) = (name for name, each in CHIPS.items() if each is chip)
    fitting = [name for name in ("int8", "float8") if chip.speeds.get_matmul_rate(name) is not None]
    having = [name for name, each in CHIPS.items() if each.speeds is not None and each.speeds.get_matmul_rate(matmul)]
    raise InvalidError(
        f"{chip_name} has no matmuls of {matmul} that are faster than those of bfloat16; use "
        f"{' or '.join([*fitting, 'compute'])}, or one of {', '.join(having)}"
    )


def parse_accelerator(text: str) -> Accelerator | None:
    """Return the accelerator that a spec names; None for `any`. Raises `InvalidError` if the catalogue has none."""
    if text == "any":
        return None
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z][a-z0-9]*)(?:-([1-9]\d*))?", text)
    name = "" if match is None else _OTHER_NAMES.get(match[2], match[2])
    if match is None or name not in CHIPS or (match[1] and not match[3]):
        raise InvalidError(f"got {text!r}, needs any, or [SLICESx]NAME[-CHIPS] with NAME one of {', '.join(CHIPS)}")
    return Accelerator(name, int(match[3]) if match[3] else None, int(match[1] or 1))


def has_device(patterns: Sequence[str]) -> bool:
    """Return True if this machine has a device whose file below /dev matches one of the patterns."""
    return any(next(Path("/dev").glob(pattern), None) for pattern in patterns)
