"""Bundled dependencies, for a machine that has JAX, Flax, Optax and Orbax but no access to a package index.

    python -m tests.benchmarks.accelerator.wheels DIRECTORY [--python 3.12] [--platform manylinux_2_28_x86_64 ...]

downloads the wheels of `BUNDLED`, on a machine with network access; the kit unpacks them with `--wheels DIRECTORY`.
"""

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

# Installed on such a machine, together with their dependencies (etils and others).
PREINSTALLED = ("jax", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "scipy", "pyyaml", "rich")
# Dependencies of the project, and their dependencies, that are not installed there.
BUNDLED = (
    "annotated-doc",
    "annotated-types",
    "array_record",
    "cloudpathlib",
    "cloudpickle",
    "google-crc32c",
    "grain",
    "portpicker",
    "pydantic",
    "pydantic-core",
    "safetensors",
    "shellingham",
    "tokenizers",
    "typer",
    "typing-extensions",
    "typing-inspection",
    "zstandard",
)
# Dependencies of the project that no command of the kit imports.
OMITTED = ("wandb", "plotly", "waitress")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def unpack(wheels: Path, target: Path) -> None:
    """Extract all wheels of the directory `wheels` into `target`, from which they can be imported.

    Raises:
        ValueError: there are no wheels, or one of them is for another version of Python.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise ValueError(f"{wheels}: no *.whl; download them with python -m tests.benchmarks.accelerator.wheels")
    for path in found:
        if not is_compatible(path.name):
            raise ValueError(
                f"{path.name} is for another Python than {sys.version_info.major}.{sys.version_info.minor}"
            )
        with zipfile.ZipFile(path) as file:
            file.extractall(target)


def is_compatible(name: str) -> bool:
    """Return True if the tags of a wheel match the version of this interpreter; the platform is not checked."""
    pythons, abi = name.removesuffix(".whl").split("-")[-3:-1]
    current = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return abi == "abi3" or bool({"py3", current} & set(pythons.split(".")))


def download(directory: Path, python: str, platforms: Sequence[str]) -> None:
    """Download the wheels of `BUNDLED` with pip, for another machine; the list includes their dependencies."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(directory)]
    command += ["--implementation", "cp", "--python-version", python]
    for platform in platforms:
        command += ["--platform", platform]
    pydantic, *_ = [path for path in _pip_download(command, "pydantic") if path.name.startswith("pydantic-")]
    with zipfile.ZipFile(pydantic) as file:
        metadata = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    # Each version of pydantic requires one exact version of pydantic-core.
    core = next(line.split()[-1] for line in lines if line.startswith("Requires-Dist: pydantic-core=="))
    _pip_download(command, core, *(name for name in BUNDLED if name not in ("pydantic", "pydantic-core")))


def _pip_download(command: Sequence[str], *names: str) -> list[Path]:
    """Run `command` for the packages `names`; return all wheels in its target directory."""
    subprocess.run([*command, *names], check=True)
    return sorted(Path(command[command.index("-d") + 1]).glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--platform", nargs="+", default=_PLATFORMS)
    parsed = parser.parse_args()
    parsed.directory.mkdir(parents=True, exist_ok=True)
    download(parsed.directory, parsed.python, parsed.platform)
    found = list(parsed.directory.glob("*.whl"))
    print(f"{len(found)} wheels, {sum(path.stat().st_size for path in found) / 2**20:.0f} MiB: {parsed.directory}")


if __name__ == "__main__":
    main()
