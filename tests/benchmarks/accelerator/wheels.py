"""What is carried along to a machine that has jax, flax, optax and orbax, and can reach no package index.

    python -m tests.benchmarks.accelerator.wheels DIRECTORY [--python 3.12] [--platform manylinux_2_28_x86_64 ...]

downloads the wheels of `CARRIED`, where there is a network; the kit unpacks them with `--wheels DIRECTORY`.
"""

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

# What such a machine has, with all that these bring (numpy, PyYAML, rich, tensorstore, etils and others).
THERE = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "pyyaml", "rich")
# What a run imports beside that: dependencies of the project, and those of theirs that nobody there brings.
CARRIED = (
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
# What no command of the kit imports.
LEFT_OUT = ("wandb", "plotly", "waitress")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def unpack(wheels: Path, target: Path) -> None:
    """Lay the content of every wheel where it can be imported from. Raises `ValueError` for one of another Python."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise ValueError(f"{wheels}: got no *.whl, needs what python -m tests.benchmarks.accelerator.wheels packs")
    for path in found:
        if not does_fit(path.name):
            raise ValueError(
                f"{path.name} is for another Python than {sys.version_info.major}.{sys.version_info.minor}"
            )
        with zipfile.ZipFile(path) as file:
            file.extractall(target)


def does_fit(name: str) -> bool:
    """Whether a wheel of this name is for the Python that runs, by its tags; the platform is not looked at."""
    pythons, abi = name.removesuffix(".whl").split("-")[-3:-1]
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return abi == "abi3" or bool({"py3", here} & set(pythons.split(".")))


def download(directory: Path, python: str, platforms: Sequence[str]) -> None:
    """Have pip download all that is carried, for another machine; what they need in turn stands in the list."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(directory)]
    command += ["--implementation", "cp", "--python-version", python]
    for platform in platforms:
        command += ["--platform", platform]
    pydantic, *_ = [path for path in _downloaded(command, "pydantic") if path.name.startswith("pydantic-")]
    with zipfile.ZipFile(pydantic) as file:
        metadata = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    # pydantic takes one version of its core alone.
    core = next(line.split()[-1] for line in lines if line.startswith("Requires-Dist: pydantic-core=="))
    _downloaded(command, core, *(name for name in CARRIED if name not in ("pydantic", "pydantic-core")))


def _downloaded(command: Sequence[str], *names: str) -> list[Path]:
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
