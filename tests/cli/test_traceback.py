"""Errors in code of the user's own: their line first, the shapes in it, and no frames of the runner or of packages."""

import importlib.util
import os
from pathlib import Path

import pytest
from flax.errors import FlaxError

from runner.cli.traceback import FULL_VARIABLE, format_bug, has_own_frames
from runner.errors import EXIT_FAILED
from runner.storage import open_store
from tests.support.job_process import run_runner
from tests.support.simulated_devices import environment

HEADER = "import flax.linen as nn, jax, jax.numpy as jnp\n"
# Code with a function `fail`, the text of the line that is named, the first line after its place, and other lines.
CASES = {
    "shapes": (
        "def fail():\n    x, w = jnp.ones((2, 3)), jnp.ones((4, 5))\n    return x @ w\n",
        "return x @ w",
        "TypeError: dot_general requires contracting dimensions to have the same shape, got (3,) and (4,).",
        ("      x: float32[2,3]", "      w: float32[4,5]"),
    ),
    "traced": (
        "@jax.jit\ndef inner(ids):\n    table = jnp.ones((7, 3), jnp.bfloat16)\n    return table[ids] + jnp.ones(4)\n"
        "def fail():\n    return inner(jnp.arange(5))\n",
        "return table[ids] + jnp.ones(4)",
        "ValueError: Incompatible shapes for broadcasting: shapes=[(5, 3), (4,)]",
        ("      table: bfloat16[7,3]", "      ids: int32[5]", "return inner(jnp.arange(5))"),
    ),
    "module": (
        "class Layer(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n"
        "        return nn.Dense(3, name='a')(x) + nn.Dense(3, name='a')(x)\n"
        "def fail():\n    Layer().init(jax.random.key(0), jnp.ones((2, 2)))\n",
        "return nn.Dense(3, name='a')(x) + nn.Dense(3, name='a')(x)",
        "flax.errors.NameInUseError",
        ("      x: float32[2,2]", "in Layer.__call__: ", "Layer().init(jax.random.key(0), jnp.ones((2, 2)))"),
    ),
    "field": (
        "def fail():\n    batch = {'x': jnp.ones(2)}\n    return batch['labels']\n",
        "return batch['labels']",
        "KeyError: 'labels'",
        (),
    ),
    "cause": (
        "def fail():\n    try:\n        {}['a']\n    except KeyError as error:\n"
        "        raise ValueError('no a') from error\n",
        "raise ValueError('no a') from error",
        "ValueError: no a",
        (),
    ),
    "recursion": ("def fail():\n    return fail()\n", "return fail()", "RecursionError: ", ()),
    "long message": (
        "def fail():\n    raise ValueError('a' * 10**6)\n",
        "raise ValueError('a' * 10**6)",
        "ValueError: a",
        (),
    ),
}


def catch(code: str, directory: Path) -> Exception:
    """Return the error that `fail` of a module with this code raises."""
    path = directory / "own_code.py"
    path.write_text(HEADER + code)
    spec = importlib.util.spec_from_file_location("own_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises((ValueError, TypeError, LookupError, RecursionError, FlaxError)) as caught:
        module.fail()
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_the_line_of_the_user_comes_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runner.cli.traceback._is_own", lambda file: "own_code" in file)  # this file is none
    code, line, message, others = CASES[name]
    error = catch(code, tmp_path)
    lines = format_bug(error).splitlines()
    number = 1 + (HEADER + code).splitlines().index(next(each for each in code.splitlines() if each.strip() == line))
    assert lines[0].startswith(f"own_code.py:{number} in ")
    assert message in lines[0]
    assert any(each.strip() == line for each in lines[1:])
    for other in others:
        assert any(other in each for each in lines), other
    assert len(lines) <= 30
    assert all(len(each) < 2200 for each in lines)
    assert not any("site-packages" in each or "jax/_src" in each for each in lines)
    assert f"{FULL_VARIABLE}=full shows them" in lines[-1]
    monkeypatch.setenv(FULL_VARIABLE, "full")
    assert format_bug(error).startswith("Traceback (most recent call last):") or "\nTraceback (most" in format_bug(
        error
    )


def test_an_error_of_the_runner_itself_has_its_traceback() -> None:
    with pytest.raises(TypeError) as caught:
        open_store("/tmp").read(7)  # type: ignore[arg-type]
    # The first frame is of this file.
    assert caught.value.__traceback__ is not None
    inner = caught.value.with_traceback(caught.value.__traceback__.tb_next)
    assert not has_own_frames(inner)
    assert format_bug(inner).startswith("Traceback (most recent call last):")
    assert "runner/storage/local.py" in format_bug(inner)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_an_error_in_a_model_takes_one_screen(command: str, tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(
        "import flax.linen as nn, jax.numpy as jnp\nfrom runner import BaseTrainer\n\n"
        "class Model(nn.Module):\n    @nn.compact\n    def __call__(self, x, deterministic=True):\n"
        "        h = nn.Embed(256, 8)(x)\n        return h @ jnp.ones((9, 256))\n\n"
        "class Train(BaseTrainer):\n    def model(self):\n        return Model()\n"
    )
    text = tmp_path / "text.txt"
    text.write_text("words " * 2000)
    (tmp_path / "own.yaml").write_text(
        f"name: own\njob: own_model:Train\ndirectory: {tmp_path}/run\ntopology: {{accelerator: any}}\nconfig:\n"
        f"  model: {{}}\n  data: {{source: {text}, sequence_length: 16}}\n  optimizer: {{learning_rate: 1.0e-3}}\n"
        "  schedule: {}\n  train: {total_steps: 2, global_batch_examples: 8}\n"
    )
    variables = environment(1) | {"PYTHONPATH": str(tmp_path)}
    code, output = run_runner(variables, *(["plan"] if command == "plan" else []), str(tmp_path / "own.yaml"))
    place = next(line for line in output.splitlines() if "own_model.py:8 in Model.__call__: TypeError" in line)
    assert (code, "Traceback" in output) == (EXIT_FAILED, False), output
    assert "got (8,) and (9,)" in place
    assert "      h: float32[1,16,8]" in output
    assert len(output.splitlines()) < 20
    assert not os.path.exists(tmp_path / "run/attempts")
