"""Classes that the `spec.yaml` of a run's directory names: nothing of them is imported unless the user allows it."""

import dataclasses
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner import open_checkpoint
from runner.attempts import compile_cache
from runner.checkpoint.fingerprint import combine_digests
from runner.checkpoint.inspect import read_document
from runner.checkpoint.manifest import MANIFEST, read_manifest
from runner.cli.app import main
from runner.config import TrainerConfig
from runner.data.open_source import split_text
from runner.errors import InvalidError, SpecError
from runner.inference.open_run import open_run
from runner.spec import Trust, parse_document, validate_config, validate_spec
from runner.storage import LocalStore
from tests.support.tiny_jobs import make_gpt

PLANTED = """
from experiments.gpt import PretrainGPT
from runner.hook import Hook

class Job(PretrainGPT):
    pass
"""
RUN = Path(__file__).parents[1] / "data/format_1/gpt"  # a run of two steps
# Changes of `spec.yaml`, by dotted key.
REFERENCES: dict[str, dict[str, Any]] = {
    "job": {"job": "planted:Job"},
    "job of a submodule": {"job": "planted.more:Job"},
    "job beside a package of ours": {"job": "runner_planted:Job"},
    "hook": {"hooks": [{"hook": "planted:Watch", "config": {}}]},
    "source": {"config.data.source": "planted:Tokens"},
    "arrays": {"config.data.source": "planted:Arrays", "config.data.sequence_length": None},
    "function": {
        "config.data.source": "planted:check_call",
        "config.data.sequence_length": None,
        "config.data.options": {"args": "touch called", "shell": True},
    },
    "mixture": {"config.data.mixture": [{"name": "a", "source": "planted:Tokens"}]},
    "validation": {"config.data.validation": {"a": {"source": "planted:Tokens"}}},
    "short validation": {"config.data.validation": {"a": "planted:Tokens"}},
    "stage": {
        "config.data": {"mixture": [{"name": "a", "source": "python-stdlib"}], "sequence_length": 16},
        "config.stages": [{"from_step": 1, "set": {"data.mixture": [{"name": "a", "source": "planted:Tokens"}]}}],
    },
}
COMMANDS: dict[str, Callable[[str, Path], list[str]]] = {
    "sample": lambda run, out: ["sample", run, "--tokens", "1"],
    "evaluate": lambda run, out: ["evaluate", run],
    "export": lambda run, out: ["export", run, "-o", str(out)],
}
# Commands that need no class of the run.
READERS: dict[str, Callable[[str, Path], list[str]]] = {
    "checkpoints": lambda run, out: ["checkpoints", run, "--deep"],
    "status": lambda run, out: ["status", run],
    "report": lambda run, out: ["report", run, "-o", str(out / "page.html")],
    "lineage": lambda run, out: ["lineage", run],
    "metrics": lambda run, out: ["metrics", run],
    "profile": lambda run, out: ["profile", run],
    "copy": lambda run, out: ["checkpoints", "copy", run, str(out / "copy")],
}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path with modules that a spec may name."""
    home = tmp_path / "modules"
    for name in ("planted/__init__.py", "planted/more.py", "runner_planted.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(PLANTED)
    monkeypatch.syspath_prepend(home)
    for name in ("planted", "planted.more", "runner_planted"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return home


def change_spec(directory: Path, changes: dict[str, Any]) -> Path:
    """Return a copy of a run whose `spec.yaml` has other values."""
    shutil.copytree(RUN, directory)
    data = yaml.safe_load((directory / "spec.yaml").read_text())
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = data
        for parent in parents:
            section = section[parent]
        section[last] = value
    (directory / "spec.yaml").write_text(yaml.safe_dump(data))
    return directory


def is_imported() -> bool:
    return any(name.partition(".")[0] in ("planted", "runner_planted") for name in sys.modules)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_directory_names_no_class_of_another_module(planted: Path, tmp_path: Path, name: str) -> None:
    run = change_spec(tmp_path / "run", REFERENCES[name])
    with pytest.raises(SpecError) as caught:
        open_run(str(run))
    module = re.search(r"(\w*planted[\w.]*):", str(REFERENCES[name]))
    assert module is not None
    assert re.fullmatch(
        f"{run}/spec.yaml:.* comes from module {module[1]}, which this directory names; if you trust it, pass --trust "
        rf"{module[1]} \(in Python: trust=\['{module[1]}'\]\)",
        str(caught.value),
    )
    assert not is_imported()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_a_class_of_another_module_in_one_line(
    planted: Path, tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = change_spec(tmp_path / "run", REFERENCES["job"])
    assert main(COMMANDS[command](str(run), tmp_path / "out")) == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"{run}/spec.yaml:")
    assert err.endswith(
        "planted:Job comes from module planted, which this directory names; if you trust it, pass --trust planted "
        "(in Python: trust=['planted'])\n"
    )
    assert (out, err.count("\n"), is_imported()) == ("", 1, False)


@pytest.mark.parametrize("command", READERS)
def test_other_commands_import_nothing_of_a_directory(planted: Path, tmp_path: Path, command: str) -> None:
    run = change_spec(tmp_path / "run", {**REFERENCES["job"], **REFERENCES["hook"], **REFERENCES["source"]})
    assert main(READERS[command](str(run), tmp_path)) == 0
    assert not is_imported()


def test_a_checkpoint_is_read_without_any_class_of_its_run(planted: Path, tmp_path: Path) -> None:
    run = change_spec(tmp_path / "run", {**REFERENCES["job"], **REFERENCES["hook"]})
    assert open_checkpoint(run)[1].job == "planted:Job"
    assert not is_imported()


@pytest.mark.soak
@pytest.mark.parametrize("key", ["init_from", "fork_from"])
def test_a_run_begins_with_another_without_its_classes(planted: Path, tmp_path: Path, key: str) -> None:
    make_gpt(tmp_path / "parent", **{"config.train.total_steps": 3})()
    run = tmp_path / "parent"
    (run / "spec.yaml").write_text((run / "spec.yaml").read_text().replace("experiments.gpt:", "planted:"))
    source: Any = str(run) if key == "init_from" else {"run": str(run), "changes": ["config.train"]}
    make_gpt(tmp_path / "run", **{f"checkpoint.{key}": source, "config.train.total_steps": 4})()
    assert not is_imported()


@pytest.mark.parametrize("name", ["--trust planted", "--trust planted.more", "own spec", "spec of the run"])
def test_the_user_allows_a_module(planted: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    job = "planted.more:Job" if "more" in name else "planted:Job"
    run = change_spec(tmp_path / "run", {"job": job})
    where = str(run)
    if name == "own spec":
        where = str(tmp_path / "mine.yaml")
        document = yaml.safe_load((run / "spec.yaml").read_text()) | {"directory": str(run)}
        Path(where).write_text(yaml.safe_dump(document))
    elif name == "spec of the run":
        where = str(run / "spec.yaml")
        text = Path(where).read_text()
        Path(where).write_text(re.sub("^directory: .*$", f"directory: {run}", text, flags=re.MULTILINE))
    code = main(["export", where, "-o", str(tmp_path / "out"), *(name.split() if name.startswith("--") else [])])
    is_refused = name == "spec of the run"
    assert (code, is_imported()) == ((2, False) if is_refused else (0, True)), capfd.readouterr()


def test_a_function_of_our_own_packages_is_not_called(tmp_path: Path) -> None:
    run = change_spec(tmp_path / "run", {"config.data": {"source": "runner.console:warn", "options": {"line": "x"}}})
    with pytest.raises(InvalidError, match="is a function; name a class with __len__ and __getitem__"):
        open_run(str(run)).job.dataset  # noqa: B018


def test_a_package_of_our_name_elsewhere_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "experiments"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("raise AssertionError('imported')")
    with pytest.raises(SpecError, match=r"module experiments\.gpt at .*experiments/__init__\.py, which this directory"):
        open_run(str(RUN))


def test_trust_reaches_the_jobs_that_tokenise_text(tmp_path: Path) -> None:
    text = f"{{name: a, job: x:Y, directory: {tmp_path}, config: {{data: {{source: a.txt, tokenise: {{}}}}}}}}"
    document = dataclasses.replace(parse_document(text, "spec.yaml"), trust=Trust())
    document, texts = split_text(document, validate_spec(document), str(tmp_path), "planted:Job")
    assert [document.trust, texts[0].document.trust] == [Trust(), Trust()]


def test_a_users_own_spec_names_any_module() -> None:
    document = parse_document("{config: {data: {source: 'planted:X', sequence_length: 8}}}", "x")
    data = dataclasses.replace(document, data={"config": document.data["config"]["data"]})
    model = TrainerConfig.model_fields["data"].annotation
    assert isinstance(model, type)
    assert validate_config(data, model).source == "planted:X"  # type: ignore[type-var]


def test_a_command_loads_no_compiled_program_of_the_directory(tmp_path: Path) -> None:
    run = change_spec(tmp_path / "run", {"topology.compile_cache": "directory"})
    job = open_run(str(run)).job
    assert job.compile_cache._shared is None
    assert compile_cache.CompileCache(job.store)._shared is not None


@pytest.mark.parametrize("command", ["deep", "open", "evaluate"])
def test_a_shape_beyond_the_memory_is_refused(tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = change_spec(tmp_path / "run", {})
    store = LocalStore(run)
    manifest = read_manifest(store, "checkpoints/2")
    name = next(name for name in manifest.leaves if name.startswith("params.") and name.endswith("embedding"))
    manifest.leaves[name]["shape"] = [10**15]
    manifest = dataclasses.replace(manifest, fingerprint=combine_digests(manifest.leaves))
    (run / "checkpoints" / "2" / MANIFEST).write_bytes(manifest.encode())
    if command == "open":
        with pytest.raises(InvalidError, match="this machine has"):
            open_checkpoint(run, 2)
        return
    words = ["checkpoints", str(run), "--deep"] if command == "deep" else ["evaluate", str(run)]
    assert main(words) == 2
    assert re.search("this machine has" if command == "deep" else "does not fit", "".join(capfd.readouterr()))


def test_a_document_of_a_directory_is_not_trusted() -> None:
    assert read_document(LocalStore(RUN)).trust == Trust()
