"""`python -m runner export`: the weights of a run in the form that everything else reads. Claims nothing."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.weights import read_document
from runner.cli.arguments import Parser, directory_of
from runner.config import DataConfig, TrainerConfig
from runner.console import say
from runner.errors import EXIT_DONE, InvalidError
from runner.history.reader import read_history
from runner.huggingface.export import export_into, publish_directory
from runner.huggingface.hub import CARD_FILE, ExportedCheckpoint, HubRepository, ModelCardText, format_model_card
from runner.huggingface.peft import export_adapter
from runner.huggingface.safetensors import CONFIG_FILE
from runner.job import RestoreableJob
from runner.metrics.file import read_encoded_rows
from runner.spec import ExecutionSpec, load_job_class, validate_spec
from runner.storage import Store, open_store, parse_json, split_checkpoint

_OF_A_PUSH = ("public", "license", "base_model")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parsed = _parse(arguments)
    repository = None if parsed.push is None else HubRepository(parsed.push, is_public=parsed.public)
    where = directory_of(parsed.where)
    directory, _ = split_checkpoint(where)
    store = open_store(directory)
    document = read_document(store)
    spec = validate_spec(document)
    job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
    job = job_class(spec, document)
    family = job.family()
    if family is None:
        raise InvalidError(f"{spec.job} does not say how its weights are called elsewhere: see `family` of BaseTrainer")
    data = job.config.data if isinstance(job.config, TrainerConfig) else None
    if parsed.adapter:
        base = "" if spec.checkpoint.initial_weights is None else spec.checkpoint.initial_weights.path
        step = export_adapter(where, parsed.step, family, parsed.out, base, parsed.dtype, parsed.weights)
        say(f"exported the adapter of step {step} of {directory} to {parsed.out}")
        return EXIT_DONE
    if repository is not None:
        repository.check()
    # OUT gets its name after the push: one that fails leaves nothing there, and the same command can be run again.
    with _directory(parsed.out) as made:
        manifest = export_into(made, where, parsed.step, family, data, parsed.dtype, weights=parsed.weights)
        if repository is not None:
            words = ModelCardText(parsed.push, parsed.license, parsed.base_model)
            (made / CARD_FILE).write_text(_card(made, store, spec, data, manifest, words))
            pushed = repository.push(made, f"Step {manifest.step} of {spec.name}")
            did = "pushed" if pushed.has_changed else "nothing has changed: it is there already,"
            say(f"{did} step {manifest.step} of {directory} at {pushed.url}")
    if parsed.out is not None:
        say(f"exported step {manifest.step} of {directory} to {parsed.out}")
    return EXIT_DONE


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("runner export")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--step", default="newest", metavar="N", help="a step, best or newest; default newest")
    parser.add_weights()
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: that of the parameters")
    parser.add_argument("--adapter", action="store_true", help="the adapter alone, as PEFT has it; else it is merged")
    parser.add_argument("-o", dest="out", metavar="OUT", help="a directory or URL where nothing is yet")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload to this repository on the Hugging Face Hub")
    parser.add_argument("--public", action="store_true", help="with --push: everybody may see it; default: private")
    parser.add_argument("--license", metavar="ID", help="with --push: for the model card, such as apache-2.0")
    parser.add_argument("--base-model", metavar="OWNER/NAME", help="with --push: for the model card")
    parsed = parser.parse_args(arguments)
    if parsed.out is None and parsed.push is None:
        parser.error("give -o OUT, --push OWNER/NAME, or both")
    if parsed.adapter and (parsed.push is not None or parsed.out is None):
        parser.error("--adapter goes with -o OUT alone")
    for name in _OF_A_PUSH:
        if getattr(parsed, name) and parsed.push is None:
            parser.error(f"--{name.replace('_', '-')}: nothing reads it without --push")
    return parsed


@contextlib.contextmanager
def _directory(out: str | None) -> Iterator[Path]:
    """A directory to write into; what it holds at the end is at `out`, or nowhere."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="export-") as directory:
            yield Path(directory)
        return
    with publish_directory(out) as found:
        yield found


def _card(
    made: Path, store: Store, spec: ExecutionSpec, data: DataConfig | None, manifest: Manifest, words: ModelCardText
) -> str:
    """The model card of what was exported into `made`."""
    rows = [line.row for line in read_encoded_rows(store, manifest.step)]
    config = parse_json((made / CONFIG_FILE).read_bytes())
    names = [path.name for path in made.iterdir()]
    return format_model_card(ExportedCheckpoint(spec, data, manifest, rows, read_history(store), config, names), words)
