"""Shipped specs, and the examples of .github/docs/specs.md: they load, validate and make their jobs."""

import re
from pathlib import Path

import pytest

from runner import BaseTrainer, RestoreableJob
from runner.spec import (
    dump_spec,
    load_document,
    load_job_class,
    make_document,
    parse_document,
    validate_config,
    validate_spec,
)

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))


@pytest.fixture(params=SPECS, ids=lambda path: path.stem)
def path(request):
    return request.param


def make_job(path):
    document = load_document(path)
    spec = validate_spec(document)
    return load_job_class(document, RestoreableJob)(spec, document)


def test_the_number_of_shipped_specs_is_limited():
    assert {"counter", "gpt_nano", "gpt_small", "gpt2_124m"} <= {path.stem for path in SPECS}
    assert len(SPECS) <= 19


def test_a_spec_makes_its_job(path):
    job = make_job(path)
    assert job.total_steps > 0
    assert job.store.url.endswith(job.spec.directory)


def test_a_trainer_spec_has_no_unused_optimizer_key(path):
    job = make_job(path)
    assert not isinstance(job, BaseTrainer) or job.setup_builder.optimizer_choice.find_problems(job.config) == {}


def test_the_name_and_directory_of_a_spec_match_its_file_name(path):
    spec = make_job(path).spec
    assert spec.name == path.stem
    assert spec.directory == f"runs/{path.stem}"


def test_the_header_of_a_spec_names_its_command_and_hardware(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert f"command: python -m runner specs/{path.name}" in "\n".join(header)
    assert "hardware:" in "\n".join(header)


def test_a_spec_survives_a_round_trip(path):
    job = make_job(path)
    text = dump_spec(job.spec)
    assert validate_spec(parse_document(text, "again.yaml")) == job.spec
    assert make_document(job.spec).data == job.spec.model_dump(mode="json")


def test_gpt2_124m_has_whole_micro_batches_on_its_hardware():
    config = make_job(ROOT / "specs" / "gpt2_124m.yaml").config
    assert config.total_steps == 4769
    assert config.train.global_batch_examples % 16 == 0


EXAMPLES = [
    text
    for text in re.findall(
        r"^```yaml\n(.*?)^```$", (ROOT / ".github" / "docs" / "specs.md").read_text(), re.DOTALL | re.MULTILINE
    )
    if "job:" in text
]


def test_the_specs_page_has_three_examples():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("text", EXAMPLES, ids=["text", "llama", "tokenise"])
def test_an_example_of_the_specs_page_is_valid(text):
    document = parse_document(text, ".github/docs/specs.md")
    spec = validate_spec(document)
    config = validate_config(document, load_job_class(document, RestoreableJob).Config)
    assert spec.name
    assert config is not None
