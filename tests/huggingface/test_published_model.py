"""`config.model` that a spec leaves to the weights it starts from, and the specs that `spec-from` writes."""

import json
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from experiments.gpt import PretrainGPT
from experiments.model.config_json import parse_config_json
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer
from runner.checkpoint.leaves import flatten_with_names
from runner.cli.app import run_command
from runner.errors import InvalidError, RunnerError, StorageError
from runner.huggingface.assets import find_assets
from runner.huggingface.mapping import match_tensors
from runner.huggingface.safetensors import open_published_weights
from runner.plan.checks import Findings, check_weights, open_job
from runner.plan.prediction import SINGLE_DEVICE, build_abstract
from runner.process import make_placements
from runner.spec import compute_trajectory, dump_spec, load_document, parse_document, validate_spec
from runner.storage import LocalStore
from tests.support.job_process import Attempt, Job, link_peers

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/experiments/hugging_face/fixtures"
FAMILIES = sorted(FIXTURES.iterdir())
GPT2 = ROOT / "tests/huggingface/gpt2"
LLAMA = ROOT / "tests/experiments/hugging_face/fixtures/llama"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 40, 20_000).astype(np.uint16))
    return tmp_path / "ids.npy"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return shutil.copytree(LLAMA, tmp_path / "llama")


def make_spec(source: Path, data: Path, model: Any = None, job: type[BaseTrainer] = PretrainDecoder) -> dict[str, Any]:
    """Return a spec that starts from published weights; `model` None leaves `config.model` out."""
    train = {"total_steps": 6, "global_batch_examples": 4, "micro_batch_examples": 2}
    length = 16 if job is PretrainDecoder else json.loads((source / "config.json").read_text())["n_positions"]
    return {
        "name": "start",
        "job": f"{job.__module__}:{job.__name__}",
        "directory": str(data.parent / "run"),
        "topology": {"accelerator": "any"},
        "checkpoint": {"init_from": str(source), "every_steps": 2, "keep_last": 9},
        "config": {
            "data": {"source": str(data), "sequence_length": length},
            "train": train,
            "optimizer": {"learning_rate": 0.001},
        }
        | ({} if model is None else {"model": model}),
    }


def make_job(spec: dict[str, Any], job: type[BaseTrainer] = PretrainDecoder) -> BaseTrainer:
    document = parse_document(json.dumps(spec, indent=1), "start.yaml")
    return job(validate_spec(document), document)


def read_trajectory(job: BaseTrainer) -> dict[str, Any]:
    return compute_trajectory(job.spec, job.config)


@pytest.mark.parametrize("source", [*FAMILIES, GPT2], ids=lambda path: path.name)
def test_the_identity_is_that_of_the_model_written_out(source: Path, data: Path) -> None:
    job_class = PretrainGPT if source == GPT2 else PretrainDecoder
    job = make_job(make_spec(source, data, job=job_class), job_class)
    config = json.loads((source / "config.json").read_text())
    assert job.config.model.vocabulary_size == config["vocab_size"]
    if job_class is PretrainDecoder:
        expected = parse_config_json(config).model_copy(update={"vocabulary_size": config["vocab_size"]})
        assert job.config.model == expected
    # The section as a person would write it: only what differs from the defaults.
    written = job.config.model.model_dump(mode="json", exclude_defaults=True)
    other = make_job(make_spec(source, data, written, job_class), job_class)
    assert read_trajectory(job) == read_trajectory(other)
    # Supervisors compare the digest of the spec as it was written.
    assert job.document.compute_digest() == parse_document(json.dumps(job.document.unfilled), "x").compute_digest()
    assert job.document.compute_digest() != other.document.compute_digest()


def test_written_keys_replace_those_of_the_weights(data: Path) -> None:
    whole = make_job(make_spec(LLAMA, data)).config.model
    given = {"neftune_alpha": 5.0, "layer_loop": "unroll", "rope": {"theta": 7.0}}
    model = make_job(make_spec(LLAMA, data, given)).config.model
    assert model == whole.model_copy(
        update={"neftune_alpha": 5.0, "layer_loop": "unroll", "rope": whole.rope.model_copy(update={"theta": 7.0})}
    )


def test_a_whole_model_needs_no_weights_to_be_read(data: Path) -> None:
    model = make_job(make_spec(LLAMA, data)).config.model.model_dump(mode="json")
    spec = make_spec(data.parent / "nowhere", data, model)
    assert make_job(spec).config.model.model_dump(mode="json") == model
    spec["config"]["model"] = {"preset": "llama3_8b"}
    assert make_job(spec).config.model.layers == 32


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        path = source / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


def drop_tensor(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, source / "model.safetensors")


BAD_DIRECTORIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "no such directory"),
    "no config.json": (lambda source: (source / "config.json").unlink(), "no config.json is here"),
    "torn config.json": (lambda source: (source / "config.json").write_text("{"), "config.json cannot be read"),
    "unknown family": (change_config(model_type="lama"), "did you mean llama?"),
    "family of a wrong type": (change_config(model_type=["llama"]), "model_type: got"),
    "unknown key": (change_config(attention_multiplier=0.5), "config.json: attention_multiplier: unknown key of llama"),
    "missing key": (change_config(hidden_size=None), "hidden_size: is missing"),
    "missing vocabulary": (change_config(vocab_size=None), "vocab_size: is missing"),
    "contradictory keys": (change_config(num_key_value_heads=3), "heads=4 does not divide over key_value_heads=3"),
    "wrong type": (change_config(rope_scaling=["x"]), "wrong type"),
    "vocabulary of a wrong type": (change_config(vocab_size="many"), "config.model.vocabulary_size: got 'many'"),
    "more layers than tensors": (change_config(num_hidden_layers=3), "model.layers.2.mlp.up_proj.weight: is missing"),
    "other width than the tensors": (change_config(intermediate_size=32), "mlp.up_proj.weight: has the shape [24, 16]"),
    "missing tensor": (drop_tensor, "model.layers.1.mlp.up_proj.weight: is missing"),
}


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_bad_weights_are_refused_in_lines_that_name_them(name: str, llama: Path, data: Path) -> None:
    damage, words = BAD_DIRECTORIES[name]
    damage(llama)
    findings = Findings()
    job = open_job(parse_document(json.dumps(make_spec(llama, data), indent=1), "start.yaml"), findings)
    if isinstance(job, BaseTrainer):
        check_weights(job, build_abstract(job.setup_builder, SINGLE_DEVICE).abstract_state, findings)
    assert any(words in line for line in findings.problems), findings.problems
    assert findings.problems[0].startswith("start.yaml:9: checkpoint.init_from: ")


def test_a_store_that_is_away_is_retried_until_the_run_has_begun(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(LLAMA, data)
    job = make_job(spec)

    def fail(where: str) -> None:
        raise StorageError(f"{where}: does not answer")

    monkeypatch.setattr("runner.huggingface.safetensors.open_store", fail)
    with pytest.raises(RunnerError, match="does not answer") as caught:
        make_job(spec)
    assert caught.value.exit_code == 76
    LocalStore(Path(spec["directory"])).write("spec.yaml", dump_spec(job.spec).encode())
    with pytest.raises(StorageError):  # this record has no model
        make_job(spec)
    recorded = job.spec.model_copy(update={"config": job.config.model_dump(mode="json")})
    LocalStore(Path(spec["directory"])).write("spec.yaml", dump_spec(recorded).encode())
    assert read_trajectory(make_job(spec)) == read_trajectory(job)


@pytest.mark.parametrize("source", [LLAMA, GPT2], ids=lambda path: path.name)
@pytest.mark.parametrize("is_written", [False, True], ids=["model left out", "model written"])
def test_ignored_keys_are_read_as_absent_and_named(is_written: bool, source: Path, data: Path, tmp_path: Path) -> None:
    job_class = PretrainGPT if source == GPT2 else PretrainDecoder
    model = make_job(make_spec(source, data, job=job_class), job_class).config.model
    other = shutil.copytree(source, tmp_path / "other")
    change_config(attention_multiplier=0.5, scales={"norm": 2.0, "other": 1.0})(other)
    spec = make_spec(other, data, model.model_dump(mode="json") if is_written else None, job_class)

    def check(*ignored: str) -> list[str]:
        spec["checkpoint"]["init_from"] = {"path": str(other), "ignored_config_keys": list(ignored)}
        findings = Findings()
        job = open_job(parse_document(json.dumps(spec, indent=1), "start.yaml"), findings)
        if isinstance(job, BaseTrainer):
            check_weights(job, build_abstract(job.setup_builder, SINGLE_DEVICE).abstract_state, findings)
            assert job.config.model == model
        return findings.problems

    (problem,) = check()
    assert "attention_multiplier: unknown key of" in problem
    assert "scales: unknown key of" in problem
    (problem,) = check("attention_multiplier", "scales.norm")
    assert "attention_multiplier" not in problem
    (problem,) = check("attention_multiplier", "sclaes")
    assert "config.json has no key sclaes to ignore; did you mean scales?" in problem
    assert check("attention_multiplier", "scales", "scales") == []
    job = make_job(spec, job_class)
    rule, mapping = job.spec.checkpoint.initial_weights, job.family()
    assert rule is not None
    assert mapping is not None
    # What an export takes over from the weights depends on it.
    recorded = find_assets(None, rule).config
    assert recorded is not None
    assert mapping.differences(recorded) == []
    weights = job.weights(build_abstract(job.setup_builder, SINGLE_DEVICE).abstract_state)
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(weights).items()}
    notes = match_tensors(open_published_weights(str(other)), mapping, shapes, rule).notes
    assert notes == tuple(f"config.json: its key {key} is ignored" for key in ("attention_multiplier", "scales"))


def test_a_run_that_began_with_an_unknown_key_goes_on(
    llama: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(llama, data)
    job = make_job(spec)
    recorded = job.spec.model_copy(update={"config": job.config.model_dump(mode="json")})
    change_config(attention_multiplier=0.5)(llama)
    with pytest.raises(InvalidError, match="attention_multiplier: unknown key"):
        make_job(spec)
    LocalStore(Path(spec["directory"])).write("spec.yaml", dump_spec(recorded).encode())
    assert read_trajectory(make_job(spec)) == read_trajectory(job)
    assert "continues with the model that it has recorded" in capsys.readouterr().err


def test_a_class_that_reads_no_config_json_needs_the_model(data: Path) -> None:
    class Own(PretrainDecoder):
        read_published_model = BaseTrainer.read_published_model

    with pytest.raises(InvalidError, match=r"start.yaml:\d+: config: missing key model"):
        make_job(make_spec(LLAMA, data), Own)


@pytest.mark.soak
def test_a_killed_run_ends_alike_without_the_directory(llama: Path, data: Path, tmp_path: Path) -> None:
    spec = make_spec(llama, data)
    spec["config"]["train"]["total_steps"] = 400
    path = tmp_path / "start.yaml"
    path.write_text(json.dumps(spec))
    whole, killed = (Job(str(path), tmp_path / name) for name in ("whole", "killed"))
    whole.finish()
    attempt = killed.start()
    attempt.wait_until(killed.committed, "a commit")
    attempt.kill()
    # Another model in the directory is another trajectory.
    change_config(rms_norm_eps=1e-3)(llama)
    refused = killed.start()
    refused.expect(2)
    assert "config.model.norm_epsilon" in refused.output
    shutil.rmtree(llama)
    assert "continues with the model that it has recorded" in killed.finish().output
    assert killed.outcome() == whole.outcome()


@pytest.mark.soak
@pytest.mark.parametrize("is_adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3", "gemma4", "gpt_oss", "olmo3", "qwen3_5", "qwen3_next"])
def test_a_killed_run_on_packed_documents_ends_alike_and_generates_in_transformers(
    family: str, is_adapter: bool, tmp_path: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    # As many characters as the models have ids, so that `sample` excludes none of them.
    generator, letters = np.random.default_rng(0), list(f"{string.ascii_letters}{string.digits}-")
    for number in range(300):
        words = ["".join(generator.choice(letters, 3)) for _ in range(generator.integers(2, 25))]
        (tmp_path / f"{number:03}.txt").write_text(" ".join(words))
    spec = make_spec(FIXTURES / family, tmp_path / "*.txt")
    data = {"source": str(tmp_path / "*.txt"), "tokenizer": "characters", "packing": "documents", "sequence_length": 64}
    spec["config"] |= {"data": data, "memory": {"loss_chunk_positions": 16, "remat": "layers"}}
    spec["config"]["train"]["total_steps"] = 20
    if is_adapter:
        # DeepSeek's queries are projected twice.
        queries = "*.query_up" if family.startswith("deepseek") else "*.query"
        spec["config"]["adapter"] = {"rank": 4, "targets": [queries, "*.attention.out"]}
    path = tmp_path / "start.yaml"
    path.write_text(json.dumps(spec))
    whole, killed = (Job(str(path), tmp_path / name) for name in ("whole", "killed"))
    whole.finish()
    attempt = killed.start()
    attempt.wait_until(killed.committed, "a commit")
    attempt.kill()
    assert killed.newest() < 20
    killed.finish()
    assert killed.outcome() == whole.outcome()

    # The same greedy text, from our cached decode and from the exported directory.
    assert run_command(["export", str(tmp_path / "killed"), "-o", str(tmp_path / "out")]) == 0
    command = [sys.executable, "-m", "runner", "sample", str(tmp_path / "killed")]
    command += ["--prompt", "abc de", "--tokens", "40", "--temperature", "0"]
    ours = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = torch.tensor([tokenizer("abc de")["input_ids"]])
    # Without a mask `generate` would leave out the space, whose id is that of the padding.
    options = {"attention_mask": torch.ones_like(prompt), "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(prompt, **options, max_new_tokens=40, do_sample=False)
    assert tokenizer.decode(found[0]) == ours.removesuffix("\n")


@pytest.mark.soak
@pytest.mark.parametrize("has_same_model", [True, False])
def test_two_processes_start_from_one_model_only(has_same_model: bool, llama: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "start.yaml"
    path.write_text(json.dumps(make_spec(llama, data)))
    job = Job(str(path), tmp_path / "run")
    other = shutil.copytree(llama, tmp_path / "other")
    if not has_same_model:
        change_config(num_hidden_layers=1)(other)
    jobs = [job, job.with_options(f"checkpoint.init_from={other}")]
    placements = make_placements(2)
    attempts = link_peers(
        [Attempt(each, ["runner", *each.arguments, *place], 1) for each, place in zip(jobs, placements, strict=True)]
    )
    for attempt in attempts:
        attempt.expect(0 if has_same_model else 2)
    assert has_same_model or "another program of the step" in attempts[0].output
    assert bool(job.committed()) == has_same_model


def write_spec(tmp_path: Path, *words: str) -> tuple[str, BaseTrainer]:
    """Run `spec-from`; return the text and the job of the spec that it writes."""
    assert run_command(["spec-from", *words, "-o", str(tmp_path / "written.yaml")]) == 0
    findings = Findings()
    job = open_job(load_document(tmp_path / "written.yaml"), findings)
    assert isinstance(job, BaseTrainer), findings.problems
    return (tmp_path / "written.yaml").read_text(), job


def test_a_written_spec_starts_from_the_directory(data: Path, tmp_path: Path) -> None:
    text, job = write_spec(tmp_path, str(LLAMA), "--data", str(data))
    assert "model" not in job.spec.config
    assert job.config.model.layers == 2
    assert (job.config.data.source, job.config.data.sequence_length) == (str(data), 64)
    # Each choice has a comment on its line or above it.
    assert text.count("#") > 12


@pytest.mark.parametrize("source", [LLAMA, GPT2], ids=lambda path: path.name)
def test_a_written_spec_names_the_ignored_keys(source: Path, data: Path, tmp_path: Path) -> None:
    other = shutil.copytree(source, tmp_path / "other")
    change_config(attention_multiplier=0.5, scales={"norm": 2.0})(other)
    words = [str(other), "--data", str(data), "--ignore-config-key"]
    with pytest.raises(InvalidError, match=r"config.json: scales: unknown key of .* --ignore-config-key scales"):
        run_command(["spec-from", *words, "attention_multiplier"])
    _, job = write_spec(tmp_path, *words, "attention_multiplier", "--ignore-config-key", "scales")
    rule = job.spec.checkpoint.initial_weights
    assert rule is not None
    assert (rule.path, rule.ignored_config_keys) == (str(other), ["attention_multiplier", "scales"])


@pytest.mark.parametrize("name", ["*.txt", "lines.jsonl"])
def test_a_written_spec_tokenises_text_first(name: str, llama: Path, tmp_path: Path) -> None:
    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "a", "b"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>")).save(str(llama / "tokenizer.json"))
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a b " * 9)
    (tmp_path / "lines.jsonl").write_text('{"text": "a b"}\n' * 9)
    text, job = write_spec(tmp_path, str(llama), "--data", str(tmp_path / name))
    section = {"tokenizer": {"kind": "hf", "file": str(llama / "tokenizer.json")}, "separator": 2}
    assert job.texts.data.tokenise == section
    assert "# The separator is the weights' eos_token_id" in text


def test_a_written_spec_is_sized_for_its_hardware(data: Path, tmp_path: Path) -> None:
    text, job = write_spec(tmp_path, str(GPT2), "--data", str(data), "--topology", "h100-2", "--lora")
    assert type(job).__name__ == "PretrainGPT"
    assert job.topology.accelerator == "h100-2"
    assert "by arithmetic the fastest mesh" in text
    mesh = job.topology.mesh.model_dump()
    assert np.prod([size for size in mesh.values() if size != "auto"]) == 2
    assert isinstance(job.config.train.micro_batch_examples, int)
    assert job.config.adapter.targets == ["*.query", "*.key", "*.value", "*.attention_out"]


@pytest.mark.soak
@pytest.mark.parametrize("source", [*FAMILIES, GPT2], ids=lambda path: path.name)
@pytest.mark.parametrize("options", [(), ("--lora",), ("--topology", "v5p-8"), ("--topology", "v5e-16", "--lora")])
def test_specs_of_every_family_are_accepted(source: Path, options: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    _, job = write_spec(tmp_path, str(source), "--data", str(data), *options)
    assert (job.config.adapter is not None) == ("--lora" in options)


@pytest.mark.soak
def test_a_written_spec_trains_and_resumes_to_the_same_bits(data: Path, tmp_path: Path) -> None:
    write_spec(tmp_path, str(LLAMA), "--data", str(data))
    options = ("config.train.total_steps=400", "checkpoint.every_steps=10")
    whole, killed = (Job(str(tmp_path / "written.yaml"), tmp_path / name, options) for name in ("whole", "killed"))
    whole.finish()
    attempt = killed.start()
    attempt.wait_until(killed.committed, "a commit")
    attempt.kill()
    assert killed.newest() < 400
    killed.finish()
    assert killed.outcome() == whole.outcome()


BAD_COMMANDS: dict[str, tuple[list[str], str]] = {
    "no directory": (["{tmp}/nowhere", "--data", "{data}"], "no such directory"),
    "no key to ignore": (["{llama}", "--ignore-config-key", "mlp_bais"], "no key mlp_bais .* did you mean mlp_bias"),
    "no weights": (["{tmp}", "--data", "{data}"], "no config.json is here"),
    "few ids": (["{llama}"], "give --data SOURCE"),
    "text, no tokenizer": (["{llama}", "--data", __file__], "tokenise.tokenizer: .*tokenizer.json: does not exist"),
    "no data": (["{llama}", "--data", "{tmp}/nothing"], "no file matches"),
    "unknown chip": (["{llama}", "--data", "{data}", "--topology", "v99-8"], "needs any, or"),
    "no number": (["{llama}", "--data", "{data}", "--topology", "v5p"], "add the number of chips"),
    "no slice": (["{llama}", "--data", "{data}", "--topology", "v5p-7"], "no slice of 7 chips"),
    "existing file": (["{llama}", "--data", "{data}", "-o", "{data}"], "needs a new name"),
}


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_spec_from_refuses_in_one_line(name: str, data: Path, tmp_path: Path) -> None:
    words, message = BAD_COMMANDS[name]
    with pytest.raises(InvalidError, match=message) as caught:
        run_command(["spec-from", *(word.format(tmp=tmp_path, data=data, llama=LLAMA) for word in words)])
    assert "\n" not in str(caught.value)
