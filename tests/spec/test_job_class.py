"""Loading of `module:Class`, and the one-line error if it fails."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.errors import SpecError
from runner.spec import imports, load_job_class, parse_document

MODULES = {
    "good": "class Base: pass\nclass Train(Base): pass\nclass Other: pass\nvalue = 3\n",
    "broken": "x = 1\nx / 0\n",
    "quits": "import sys\nsys.exit(3)\n",
    "garbled": "x = (\n",
    "needy": "import no_such_library\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's checkout with a package of job modules, as the current directory."""
    root = tmp_path / "checkout_jobs"
    root.mkdir()
    for name, text in {"__init__": "", **MODULES}.items():
        (root / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield root
    for name in [name for name in sys.modules if name.split(".")[0] == root.name]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("checkout_jobs.god:Train", "no module checkout_jobs.god; did you mean checkout_jobs.good?"),
        ("checkout_jobs.zzz:Train", "no module checkout_jobs.zzz"),
        ("checkout_jobs.good.x:Train", "no module checkout_jobs.good.x"),
        ("checkout_jobs.good:Trian", "module checkout_jobs.good has no Trian; did you mean Train?"),
        ("checkout_jobs.good:Other", "checkout_jobs.good:Other is not a subclass of Base; choose from Train"),
        ("checkout_jobs.good:value", "checkout_jobs.good:value is not a subclass of Base; choose from Train"),
        (
            "checkout_jobs.broken:Train",
            "importing checkout_jobs.broken raised ZeroDivisionError: division by zero (at {root}/broken.py:2)",
        ),
        ("checkout_jobs.quits:Train", "importing checkout_jobs.quits raised SystemExit: 3 (at {root}/quits.py:2)"),
        (
            "checkout_jobs.garbled:Train",
            "importing checkout_jobs.garbled raised SyntaxError: '(' was never closed (at {root}/garbled.py:1)",
        ),
        (
            "checkout_jobs.needy:Train",
            "importing checkout_jobs.needy raised ModuleNotFoundError: No module named 'no_such_library' "
            "(at {root}/needy.py:1)",
        ),
    ],
)
def test_a_job_that_does_not_load_gives_one_line(package: Path, job: str, message: str) -> None:
    base = load_job_class(parse_document("job: checkout_jobs.good:Base", "x"), object)
    document = parse_document(f"name: x\njob: {job}", "specs/x.yaml")
    with pytest.raises(SpecError) as caught:
        load_job_class(document, base)
    assert str(caught.value) == f"specs/x.yaml:2: job: {message.format(root=package)}"


def test_a_missing_module_is_reported_with_the_search_path(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = package / "elsewhere"
    monkeypatch.setattr(sys, "path", [str(package.parent), str(elsewhere), sys.prefix, ""])
    for job, end in {
        "checkout_job.good:Train": "; did you mean checkout_jobs?",
        "vit:Train": "; start where it lies, or name its directory in PYTHONPATH",
    }.items():
        with pytest.raises(SpecError) as caught:
            load_job_class(parse_document(f"name: x\njob: {job}", "x"), object)
        module = job.partition(":")[0].partition(".")[0]
        assert str(caught.value) == (
            f"x:2: job: no module {module} in {package.parent}, {elsewhere} or among the installed packages{end}"
        )


def test_a_job_in_the_current_directory_loads(package: Path) -> None:
    base = load_job_class(parse_document("job: checkout_jobs.good:Base", "x"), object)
    job_class = load_job_class(parse_document("job: checkout_jobs.good:Train", "x"), base)
    assert job_class.__name__ == "Train"
    assert issubclass(job_class, base)


@pytest.mark.parametrize(
    ("is_checkout", "here", "extra", "expected"),
    [
        (True, True, "s3", "pip install -e '.[s3]'"),
        (True, False, "s3", "pip install -e '{checkout}[s3]'"),
        (True, True, None, "pip install -e ."),
        (False, True, "parquet", "pip install 'pyarrow>=15'"),
        (False, True, "s3", "pip install 'cloudpathlib[s3]'"),
        (False, True, "tiktoken", "pip install tiktoken"),  # not in the metadata
        (False, True, None, "pip install numpy"),
    ],
)
def test_the_hint_to_install_a_package_fits_the_installation(is_checkout, here, extra, expected, tmp_path, monkeypatch):
    checkout = tmp_path / "check out"
    (checkout / "runner").mkdir(parents=True)
    if is_checkout:
        (checkout / "pyproject.toml").write_text("")
    monkeypatch.setattr(imports.runner, "__file__", str(checkout / "runner" / "__init__.py"))
    requirements = ["jax>=0.10", 'pyarrow>=15; extra == "parquet"', "cloudpathlib[s3]; extra == 's3'"]
    monkeypatch.setattr(imports.metadata, "requires", lambda name: requirements)
    monkeypatch.chdir(checkout if here else tmp_path)
    assert imports.format_install(extra, "numpy") == expected.replace("{checkout}", str(checkout))
