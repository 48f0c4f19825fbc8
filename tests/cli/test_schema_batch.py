"""`schema SPEC --batch` lists exactly what `forward` gets; `spec` prints the shipped specs."""

import re
from pathlib import Path
from typing import Any

import pytest

from runner.cli.app import main
from runner.errors import EXIT_DONE, EXIT_INVALID
from runner.job import make_job
from runner.spec import load_document, validate_spec

SPECS = {
    "tokens": ("gpt_nano",),
    "documents": ("gpt_nano", "config.data.packing=documents"),
    "padding": ("gpt_nano", "config.data.packing=pad"),
    "images": ("vit_nano",),
    "two arrays": ("clip_nano",),
}


@pytest.mark.parametrize("case", SPECS)
def test_the_list_equals_the_batch_that_forward_gets(
    case: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *overrides = SPECS[case]
    spec = str(Path(__file__).parents[2] / f"specs/{name}.yaml")
    assert main(["schema", spec, "--batch", *(word for each in overrides for word in ("--set", each))]) == EXIT_DONE
    listed = {}
    for line in capfd.readouterr().out.splitlines()[1:]:
        match = re.match(r"  (\w+) +(\w+) +\(B(?:, ([\d, ]+))?,?\)", line)
        assert match, line
        listed[match[1]] = (match[2], tuple(map(int, filter(None, (match[3] or "").split(", ")))))

    document = load_document(spec, overrides)
    job: Any = make_job(document, validate_spec(document))
    found = {}
    forward = type(job).forward

    def record(apply_fn: Any, params: Any, batch: Any, key: Any) -> Any:
        found.update({each: (str(array.dtype), array.shape[1:]) for each, array in batch.items()})
        return forward(apply_fn, params, batch, key)

    monkeypatch.setattr(type(job), "forward", staticmethod(record))
    setup = job.train_setup
    job.setup_builder.trace(setup)
    assert found == listed


@pytest.mark.parametrize("words", [["--batch"], ["--set", "a=1"], ["specs/counter.yaml", "--batch"]])
def test_there_is_no_batch_without_a_trainer(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", *words]) == EXIT_INVALID
    assert capfd.readouterr().err.count("\n") == 1


def test_the_shipped_specs_are_listed_and_printed(capfd: pytest.CaptureFixture[str]) -> None:
    directory = Path(__file__).parents[2] / "specs"
    assert main(["spec"]) == EXIT_DONE
    listed = [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert listed == sorted(path.stem for path in directory.glob("*.yaml"))
    for name in listed:
        assert main(["spec", name]) == EXIT_DONE
        assert capfd.readouterr().out == (directory / f"{name}.yaml").read_text(encoding="utf-8")
    assert main(["spec", "gpt_nan"]) == EXIT_INVALID
    assert capfd.readouterr().err == "spec gpt_nan: no such spec; did you mean gpt_nano?\n"
