"""The base install without extras: commands of README.md, imports of all modules, and messages for missing extras."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from runner.spec.imports import EXTRA_PACKAGES, format_install
from tests.repository.test_readme import list_bash_blocks
from tests.support.simulated_devices import environment
from tests.support.tokenise_inputs import (
    make_hf_tokenizer,
    make_sentencepiece_model,
    make_tiktoken_ranks,
    make_tokenise_document,
)
from tests.support.virtual_environment import (
    PAGE_EXTRAS,
    ROOT,
    is_extra_installed,
    list_distributions,
    list_installed,
    make_virtual_environment,
)

# Imports every module, then runs each of a list of command lines in a forked child, so that the imports, which are most
# of the cost of a command, are made only once.
PROBE = r"""
import json, os, pkgutil, sys
import runner, experiments, launch.app
from runner.cli.app import main
from runner.errors import InvalidError
from runner.spec.imports import import_extra

cases = json.load(sys.stdin)
missing = {}
for package in (runner, experiments, launch):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            try:
                import_extra(module.name)
            except InvalidError as error:
                missing[module.name] = str(error)
ends = {}
for name, words in cases.items():
    if child := os.fork():
        ends[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        continue
    output = os.open(f"{name}.output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1), os.dup2(output, 2)
    code = 99
    try:
        code = (launch.app.main if words[0] == "sweep" else main)(words)
        sys.stdout.flush()
    finally:
        os._exit(code)
json.dump({"missing": missing, "ends": ends}, sys.stdout)
"""
PLUGINS = {"tpu", "tpu-plan", "gpu-plan", "cuda"}  # plugins of jax, which works without them


def write_commands(directory: Path) -> dict[str, list[str]]:
    """Write input files, and return a command line for each extra that needs it."""
    (directory / "lines.jsonl").write_text(
        json.dumps({"text": "a", "messages": [{"role": "assistant", "content": "a"}]})
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), directory / "table.parquet")
    (directory / "hf.json").write_bytes(make_hf_tokenizer())
    (directory / "sp.model").write_bytes(make_sentencepiece_model())
    (directory / "tk.tiktoken").write_bytes(make_tiktoken_ranks())
    (directory / "chat.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    jobs: dict[str, dict[str, Any]] = {
        "parquet": {"config.source": "table.parquet"},
        "sentencepiece": {"config.tokenizer": {"kind": "sentencepiece", "file": "sp.model"}},
        "tiktoken": {"config.tokenizer": {"kind": "tiktoken", "file": "tk.tiktoken", "pattern": "."}},
        "chat": {"config.chat": {"template": "chat.json"}},
    }
    cases = {}
    for name, changes in jobs.items():
        document = make_tokenise_document(f"runs/{name}", **{"config.source": "lines.jsonl"} | changes)
        (directory / f"{name}.yaml").write_text(json.dumps(document))
        cases[name] = [f"{name}.yaml"]
    for name, scheme in (("gcs", "gs"), ("s3", "s3"), ("azure", "az")):
        cases[name] = [str(ROOT / "specs/counter.yaml"), "--set", f"directory={scheme}://bucket/run"]
    cases["lm-eval"] = ["evaluate", "runs/any", "--harness", "arc_easy"]
    search = ["--search", "config.optimizer.learning_rate=log(1e-3,3e-3)", "--number", "2"]
    cases["search"] = ["sweep", str(ROOT / "specs/gpt_nano.yaml"), *search, "--root", "runs/search"]
    cases["hub"] = ["export", "runs/any", "--push", "owner/model"]
    return cases


def run_probe(directory: Path, python: Path) -> dict[str, Any]:
    """Run `PROBE` in an environment and a new directory, and return the missing modules, exit codes and outputs."""
    directory.mkdir()
    cases = write_commands(directory)
    done = subprocess.run(
        [python, "-c", PROBE],
        cwd=directory,
        env=environment(1),
        input=json.dumps(cases),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    probe_results = json.loads(done.stdout)
    return probe_results | {"output": {name: (directory / f"{name}.output").read_text() for name in cases}}


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_virtual_environment(tmp_path_factory.mktemp("base") / "env")


@pytest.fixture(scope="module")
def probe_results(tmp_path_factory: pytest.TempPathFactory, base_python: Path) -> dict[str, Any]:
    return run_probe(tmp_path_factory.mktemp("probe") / "here", base_python)


def is_missing(extra: str) -> bool:
    """Return True if the base install lacks a package of the extra."""
    return not is_extra_installed(extra) or list_distributions(extra) > list_distributions()


def test_the_table_of_extras_contains_every_extra_of_the_project():
    assert sorted(EXTRA_PACKAGES) == PAGE_EXTRAS
    here = list_installed()
    for extra, packages in EXTRA_PACKAGES.items():
        if is_extra_installed(extra) and is_missing(extra):
            brought = [here[name] for name in list_distributions(extra) - list_distributions()]
            tops = {file.parts[0].removesuffix(".py") for distribution in brought for file in distribution.files or ()}
            assert tops >= set(packages) - {"jax_cuda12_plugin"}


def format_install_elsewhere(extra: str) -> str:
    """Return the command that a process in another directory prints."""
    return format_install(extra).replace("'.[", f"'{ROOT}[")


def test_every_module_imports_in_the_base_install_or_names_its_extra(probe_results):
    for module, message in probe_results["missing"].items():
        assert "\n" not in message
        assert message.endswith(tuple(map(format_install_elsewhere, EXTRA_PACKAGES))), f"{module}: {message}"
    assert not {"runner.trainer", "experiments.tokenise.job", "launch.local.run"} & probe_results["missing"].keys()


@pytest.mark.parametrize("extra", sorted(set(EXTRA_PACKAGES) - PLUGINS))
def test_a_missing_extra_exits_with_2_and_its_install_command(probe_results, tmp_path, extra):
    if not is_missing(extra):
        assert "needs the package" not in probe_results["output"][extra]
        return
    output = probe_results["output"][extra].strip()
    assert probe_results["ends"][extra] == 2, output
    assert "\n" not in output
    assert output.endswith(format_install_elsewhere(extra))


def test_a_missing_extra_leaves_no_run_directory(probe_results, tmp_path_factory):
    (here,) = tmp_path_factory.getbasetemp().glob("probe?/here")
    assert not list((here / "runs").glob("*/*"))


@pytest.mark.soak
@pytest.mark.parametrize(
    "extra", [extra for extra in sorted(set(EXTRA_PACKAGES) - PLUGINS) if is_extra_installed(extra)]
)
def test_an_installed_extra_is_complete(tmp_path, extra):
    output = run_probe(tmp_path / "here", make_virtual_environment(tmp_path / "env", [extra]))["output"][extra]
    assert "needs the package" not in output


def test_pages_show_editable_installs_of_extras():
    texts = [path for pattern in ("*.md", "*.py", "*.yaml") for path in ROOT.rglob(pattern)]
    texts = [path for path in texts if not path.relative_to(ROOT).parts[0].startswith((".venv", "build", "runs"))]
    for path in texts:
        for command in re.findall(r"pip install [^\n`]*\[[a-z-]+\]", path.read_text()):
            assert re.search(r"-e '?\.\[", command), f"{path}: {command}"


@pytest.mark.soak
def test_the_readme_commands_run_in_the_base_install(base_python, tmp_path):
    (commands,) = [block for block in list_bash_blocks(ROOT / "README.md") if "raw.jsonl.zst" in block]
    own, _, train = commands.rpartition(".venv/bin/python -m runner")
    assert "config.data.source=runs/tokens/corpus" in train
    for name in (".github", "specs", "runner"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(base_python.parents[1])
    sample = ".venv/bin/python -m runner sample --help"
    done = subprocess.run(
        ["bash", "-e", "-c", f"{own}{sample}"], cwd=tmp_path, env=environment(1), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/tokens/corpus/index.json").exists()
    assert "--prompt" in done.stdout
