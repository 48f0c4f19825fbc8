"""Virtual environments with this project, its requirements and some extras, linked from the installed packages."""

import functools
import importlib.metadata
import os
import re
import tomllib
import venv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path, PurePath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PAGE_EXTRAS = sorted(EXTRAS.keys() - {"test", "parity"})  # without the extras for developers


@functools.cache
def list_installed() -> dict[str, Distribution]:
    """Return every installed distribution by its canonical name."""
    found: dict[str, Distribution] = {}
    for distribution in importlib.metadata.distributions():
        found.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    return found


@functools.cache
def list_requirements(name: str, extra: str) -> list[Requirement]:
    """Return the requirements of an installed distribution, with one of its extras or (if empty) without extras."""
    requirements = map(Requirement, list_installed()[name].requires or ())
    return [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]


@functools.cache
def list_distributions(*extras: str) -> frozenset[str]:
    """Return the installed distributions that an install with these extras brings, transitively."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    waiting = [Requirement(text) for text in texts]
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name == PROJECT["name"] or name not in list_installed():
            continue
        found.add(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += list_requirements(name, extra)
    return frozenset(found)


def is_extra_installed(extra: str) -> bool:
    """Return True if all direct requirements of an extra are installed."""
    here = list_installed()
    return all(canonicalize_name(Requirement(text).name) in here for text in EXTRAS[extra])


def list_named_extras(text: str) -> list[str]:
    """Return the extras that the `pip install` commands of a page name."""
    found = {name for names in re.findall(r"pip install [^\n`]*\.\[([a-z,-]+)\]", text) for name in names.split(",")}
    return sorted(found - {"test", "parity"})


def make_virtual_environment(directory: Path, extras: Iterable[str] = (), root: Path = ROOT) -> Path:
    """Make a virtual environment like that of `pip install -e '.[extras]'` in `root`, and return its python."""
    venv.EnvBuilder(symlinks=True).create(directory)
    (packages,) = directory.glob("lib/python*/site-packages")
    for path, target in _list_links(list_installed(), list_distributions(*extras)):
        link = packages / path
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(target)
    (packages / "project.pth").write_text(f"{root}\n")
    metadata = packages / f"{PROJECT['name']}-{PROJECT['version']}.dist-info"
    metadata.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {PROJECT['name']}", f"Version: {PROJECT['version']}"]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n")
    return directory / "bin" / "python"


def _list_links(here: dict[str, Distribution], wanted: frozenset[str]) -> Iterator[tuple[PurePath, str]]:
    """Yield links and their targets: whole directories, or single files where a directory is shared with others."""
    owners: dict[str, set[str]] = defaultdict(set)
    files: dict[str, list[PurePath]] = {}
    for name, distribution in here.items():
        files[name] = [path for path in distribution.files or () if ".." not in path.parts]
        for top in {path.parts[0] for path in files[name]} - {"__pycache__"}:
            owners[top].add(name)
    for name in wanted:
        for top in sorted({path.parts[0] for path in files[name]} - {"__pycache__"}):
            if owners[top] <= wanted:
                yield PurePath(top), os.fspath(here[name].locate_file(top))
            else:
                for path in files[name]:
                    if path.parts[0] == top and "__pycache__" not in path.parts:
                        yield path, os.fspath(here[name].locate_file(path))
