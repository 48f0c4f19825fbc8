"""`python -m runner export`: the weights of a run in the form that everything else reads. Claims nothing."""

from collections.abc import Sequence

from runner.checkpoint.weights import read_document
from runner.command.arguments import Parser, directory_of
from runner.config import TrainerConfig
from runner.errors import EXIT_DONE, InvalidError
from runner.job import RestoreableJob
from runner.spec import load_job_class, validate_spec
from runner.storage import open_store, split_checkpoint
from runner.terminal import say
from runner.weights.export import export
from runner.weights.peft import export_adapter


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("runner export")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--step", default="newest", metavar="N", help="a step, best or newest; default newest")
    parser.add_weights()
    parser.add_argument("--adapter", action="store_true", help="the adapter alone, as PEFT has it; else it is merged")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: that in the checkpoint")
    parser.add_argument("-o", dest="out", required=True, metavar="OUT", help="a directory or URL where nothing is yet")
    parsed = parser.parse_args(arguments)
    where = directory_of(parsed.where)
    directory, _ = split_checkpoint(where)
    document = read_document(open_store(directory))
    spec = validate_spec(document)
    job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
    job = job_class(spec, document)
    family = job.family()
    if family is None:
        raise InvalidError(f"{spec.job} does not say how its weights are called elsewhere: see `family` of BaseTrainer")
    data = job.config.data if isinstance(job.config, TrainerConfig) else None
    if parsed.adapter:
        base = "" if spec.checkpoint.weights is None else spec.checkpoint.weights.path
        step = export_adapter(where, parsed.step, family, parsed.out, base, parsed.dtype, parsed.weights)
    else:
        step = export(where, parsed.step, family, data, parsed.out, parsed.dtype, weights=parsed.weights)
    say(f"exported {'the adapter of ' * parsed.adapter}step {step} of {directory} to {parsed.out}")
    return EXIT_DONE
