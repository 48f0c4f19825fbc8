"""A version of JAX without a part that is not public is refused in one line, by each command that uses JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from runner.jax_internals import NEEDED
from tests.support.job_process import drop_plugin_messages
from tests.support.simulated_devices import environment

ROOT = Path(__file__).parents[1]
# The interpreter imports this module at its start, so JAX is as another version would be.
ABSENT = """
import importlib
{action}
"""


def run_with(directory: Path, action: str, *words: str) -> subprocess.CompletedProcess[str]:
    (directory / "sitecustomize.py").write_text(ABSENT.format(action=action))
    variables = environment(1) | {"PYTHONPATH": f"{directory}:{ROOT}"}
    done = subprocess.run([sys.executable, "-m", *words], env=variables, cwd=ROOT, capture_output=True, text=True)
    done.stderr = drop_plugin_messages(done.stderr)
    return done


@pytest.mark.daily(2)
@pytest.mark.parametrize(("module", "attribute"), [(module.__name__, name) for module, name in NEEDED])
def test_a_version_of_jax_without_a_part_is_refused_in_one_line(module: str, attribute: str, tmp_path: Path) -> None:
    action = f"import jax\ndelattr(importlib.import_module({module!r}), {attribute!r})"
    done = run_with(tmp_path, action, "runner", "specs/counter.yaml", "--set", f"directory={tmp_path}/run")
    assert (done.returncode, done.stdout) == (2, "")
    line, *others = done.stderr.splitlines()
    assert f"{module} has no {attribute}" in line
    assert not others or module == "jax._src.distributed"  # JAX itself uses this one at its exit
    assert not (tmp_path / "run").exists()


def test_a_version_of_jax_without_a_module_is_refused_in_one_line(tmp_path: Path) -> None:
    name = "compilation_cache"
    action = f"import jax, sys\nsys.modules['jax._src.{name}'] = None\ndelattr(jax._src, '{name}')"
    done = run_with(tmp_path, action, "runner", "plan", "specs/counter.yaml")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "jax._src.compilation_cache" in line
    assert "install another version of jax" in line


def test_no_other_module_imports_what_is_not_public() -> None:
    for path in (path for name in ("runner", "experiments", "launch") for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            is_private = any(name.startswith("jax._src") for name in names)
            assert not is_private or path.name == "jax_internals.py", path
