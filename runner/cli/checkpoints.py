"""Commands on the checkpoints of a run that need jax: checkpoints, copy, sample, evaluate, predict, export, profile."""

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.checkpoint.inspect import (
    VerifyDepth,
    copy_checkpoint,
    find_best_name,
    find_checkpoint,
    format_report,
    read_document,
)
from runner.checkpoint.manifest import CHECKPOINTS
from runner.cli.arguments import (
    CheckpointsArguments,
    CopyArguments,
    EvaluateArguments,
    ExportArguments,
    PredictArguments,
    ProfileArguments,
    SampleArguments,
)
from runner.cli.run import find_placement
from runner.cli.status import (
    convert_read_errors,
    find_directory,
    find_run,
    open_run_store,
    validate_new_file,
    validate_output,
)
from runner.console import say, warn, write_lines, write_text
from runner.distributed.agreement import Hosts
from runner.distributed.preemption import end_process
from runner.distributed.rendezvous import join_job
from runner.errors import EXIT_DONE, EXIT_RETRYABLE, InvalidError, RunnerError
from runner.evaluation.builtin import HARNESS
from runner.evaluation.generation import Sampler
from runner.history.reader import read_history
from runner.huggingface.export import ExportOptions, export_adapter, export_into, publish_directory
from runner.huggingface.hub import CARD_FILE, ExportedCheckpoint, HubRepository, ModelCardText, format_model_card
from runner.huggingface.safetensors import CONFIG_FILE
from runner.inference import top_k
from runner.inference.evaluate import (
    CheckpointEvaluator,
    EvaluationRequest,
    evaluate,
    follow,
    format_record,
    parse_source,
)
from runner.inference.open_run import NEWEST, ReadOnlyRun, SampleRequest, open_run, sample
from runner.inference.predict import PredictionWriter
from runner.job import RestoreableJob
from runner.metrics.file import read_encoded_rows
from runner.spec import MAX_PROFILE_STEPS, Trust, load_job_class, validate_spec
from runner.spec.imports import import_extra
from runner.storage import (
    JsonObject,
    Store,
    append_line,
    encode_line,
    local_directory,
    open_store,
    parse_json,
    parse_lines,
    split_checkpoint,
)
from runner.storage.store import translate_errors
from runner.train.profiler import FOLDER, POLL_BUCKET_SECONDS, request_profile
from runner.train.text_first import is_tokenised_like, tokenise_like
from runner.trainer import BaseTrainer

_HARNESS = "runner.inference.harness"  # as `HARNESS`


def print_sample(arguments: SampleArguments) -> int:
    """Print text from the model of a run on standard output; everything else goes to standard error."""
    sampler = Sampler(arguments.temperature, arguments.top_p, arguments.seed)
    request = SampleRequest(
        arguments.prompt, arguments.step, arguments.num_tokens, sampler, arguments.weights, is_chat=arguments.is_chat
    )
    with convert_read_errors():
        run = open_run(*find_run(arguments.where, arguments.trust))
        run.prepare_process()
        for piece in sample(run, request):
            if not write_text(piece):
                break
    return EXIT_DONE


def print_evaluation(arguments: EvaluateArguments) -> int:
    """Evaluate weights of a run. Called with the same arguments on every host; process 0 prints."""
    if arguments.harness is not None:
        import_extra(_HARNESS)  # a missing package is reported before weights are loaded
    output = None
    if arguments.output is not None and not (arguments.save_top_k is not None and "://" in arguments.output):
        output = validate_output(arguments.output, [], "a file" if arguments.save_top_k is None else "a directory")
    step = None if arguments.is_every_step else arguments.step or NEWEST
    return _evaluate_on_hosts(arguments, step, output, functools.partial(_print_records, arguments))


def write_predictions(arguments: PredictArguments) -> int:
    """Write the outputs of a run's model on data. Called with the same arguments on every host; process 0 writes."""
    output = validate_new_file(arguments.output, [])
    if output.suffix not in (".jsonl", ".npz"):
        raise InvalidError(f"-o {arguments.output}: names no format; end it in .jsonl (JSON lines) or .npz (NumPy)")
    if output.exists():
        raise InvalidError(f"-o {arguments.output}: exists already; name a new file")

    def predict(run: ReadOnlyRun, request: EvaluationRequest, hosts: Hosts) -> None:
        source = request.data
        assert source is not None, "PredictArguments requires it"
        for record in evaluate(
            run, request, hosts, lambda own: PredictionWriter(own, source, output, hosts, arguments.weights)
        ):
            say(f"step {record['step']}: {record['examples']:,} examples, written to {arguments.output}")

    return _evaluate_on_hosts(arguments, arguments.step, output, predict)


def _evaluate_on_hosts(
    arguments: EvaluateArguments | PredictArguments,
    step: str | None,
    output: Path | None,
    act: Callable[[ReadOnlyRun, EvaluationRequest, Hosts], None],
) -> int:
    """Open the run that the arguments name, join the other processes, and call `act` with the data to read."""
    with convert_read_errors():
        run = open_run(*find_run(arguments.where, arguments.trust))
        if output is not None:
            validate_outside_run(output, run.store)
        source = None if arguments.data is None else parse_source(arguments.data)
        request = EvaluationRequest(source, step, arguments.weights)
        deadlines = run.job.spec.deadlines
        placement = find_placement(
            arguments.coordinator, arguments.num_processes, arguments.process_id, deadlines.start_seconds
        )
        run.prepare_process()  # before `join_job` uses the first device
        hosts = join_job(placement, deadlines)
        has_text = request.data is not None and is_tokenised_like(run.job.texts, request.data)
        if hosts.num_processes == 1:
            with tempfile.TemporaryDirectory(prefix="runner-evaluate-") as scratch:
                if request.data is not None and has_text:
                    request = dataclasses.replace(request, data=tokenise_like(run.job.texts, request.data, scratch))
                act(run, request, hosts)
            return EXIT_DONE
        code = EXIT_DONE
        try:
            if has_text:
                raise InvalidError(f"--data {arguments.data}: is text, which one process can tokenise; use one process")
            act(run, request, hosts)
            # Process 0 still writes its last record when the others are done; all leave together.
            hosts.barrier()
        except (RunnerError, OSError) as error:
            warn(str(error))
            code = error.exit_code if isinstance(error, RunnerError) else EXIT_RETRYABLE
        # A process that ended before the others know about it would look like one that has crashed.
        hosts.leave(code)
        end_process(code)
    return EXIT_DONE


def _print_records(arguments: EvaluateArguments, run: ReadOnlyRun, request: EvaluationRequest, hosts: Hosts) -> None:
    make_evaluator: Callable[[ReadOnlyRun], CheckpointEvaluator] | None = None
    format_lines = format_record
    if arguments.harness is not None:
        harness = import_extra(_HARNESS)
        tasks = import_extra(HARNESS).load_tasks(arguments.harness.split(","), arguments.include_path)
        make_evaluator = functools.partial(harness.HarnessEvaluator, hosts=hosts, tasks=tasks)
        format_lines = harness.format_record
    path = None
    if arguments.save_top_k is not None:
        assert request.data is not None, "EvaluateArguments requires it"
        assert arguments.output is not None, "EvaluateArguments requires it"
        make_evaluator = functools.partial(
            top_k.TopKWriter,
            source=request.data,
            hosts=hosts,
            weights=request.weights,
            top_k=arguments.save_top_k,
            output=arguments.output,
        )
        format_lines = top_k.format_record
    elif arguments.output is not None:
        path = local_directory(arguments.output)
    # Only process 0 reads the file: all processes must skip the same steps, or their collectives would not match.
    known: list[int] = hosts.run_on_main(lambda: [] if path is None else read_recorded_steps(path))
    if arguments.is_follow:
        records = follow(
            run, request.data, hosts, known.__contains__, weights=request.weights, make_evaluator=make_evaluator
        )
    else:
        records = evaluate(run, request, hosts, make_evaluator)
    for record in records:
        if path is not None:
            append_record(path, record)
        is_read = write_text(json.dumps(record) + "\n") if arguments.as_json else write_lines(format_lines(record))
        # `evaluate RUN --follow | head` ends when `head` does. With several processes all continue: if one ended, the
        # others would wait for it.
        if not is_read and path is None and hosts.num_processes == 1:
            break


def validate_outside_run(path: Path, store: Store) -> None:
    """Raise `InvalidError` if a file would lie in the directory of a run, where only the run may write."""
    if store.root is not None and path.resolve().is_relative_to(store.root.resolve()):
        raise InvalidError(f"--output {path}: lies in the run's directory, where only the run writes; name another")


def read_recorded_steps(path: Path) -> list[int]:
    """Return the steps that have a line in the file of `--output`, and cut off a line that a kill left incomplete."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidError(f"--output {path}: {error}") from error
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        # The step of the incomplete line is evaluated again.
        os.truncate(path, len(whole))
    return [record["step"] for record in parse_lines(whole) if type(record.get("step")) is int]


def append_record(path: Path, record: JsonObject) -> None:
    """Append a line, which is durable when this returns."""
    append_line(path, encode_line(record), is_durable=True)


def export(arguments: ExportArguments) -> int:
    """Export weights of a run in Hugging Face's layout, into a directory, to the Hub, or both."""
    repository = None if arguments.push is None else HubRepository(arguments.push, is_public=arguments.is_public)
    where, trust = find_run(arguments.where, arguments.trust)
    directory, _ = split_checkpoint(where)
    store = open_store(directory)
    if arguments.output is not None and "://" not in arguments.output:
        validate_output(arguments.output, [store], "a directory")
    # The spec that the run has recorded counts, not the file that the user may have edited since.
    document = read_document(store, Trust(tuple(trust)))
    spec = validate_spec(document)
    job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
    # The job is never set up: its class alone knows how its leaves map to Hugging Face's names.
    job = job_class(spec, document)
    if isinstance(job, BaseTrainer) and job.programs.has_stages:
        # A stage may have changed what the files say of the model, such as its rotary positions.
        name = find_checkpoint(where, arguments.step)[0].rpartition("/")[2]
        job = job.at_step(int(name)) if name.isdecimal() else job
    family = job.family()
    if family is None:
        raise InvalidError(
            f"{spec.job} does not map its parameters to Hugging Face's names; implement `family` of BaseTrainer, or "
            f"take the weights in Python: runner.open_checkpoint({where!r})"
        )
    data = job.config.data if isinstance(job, BaseTrainer) else None
    if arguments.is_adapter:
        assert arguments.output is not None, "ExportArguments requires it"
        base = "" if spec.checkpoint.initial_weights is None else spec.checkpoint.initial_weights.path
        step = export_adapter(where, arguments.step, family, arguments.output, base, arguments.dtype, arguments.weights)
        say(f"exported the adapter of step {step} of {directory} to {arguments.output}")
        return EXIT_DONE
    if repository is not None:
        # Missing permission or a wrong name is found before gigabytes are read.
        repository.check()
    # The output gets its name only after the push. If the push fails, nothing is left, and the command can run again.
    with _open_output(arguments.output) as output:
        options = ExportOptions(
            arguments.dtype,
            weights=arguments.weights,
            base=spec.checkpoint.initial_weights,
            context=arguments.context,
            tokenizer=arguments.tokenizer,
        )
        manifest = export_into(output, where, arguments.step, family, data, options)
        if repository is not None and arguments.push is not None:
            exported = ExportedCheckpoint(
                spec,
                # The card names the text, not the corpus that the run has made of it.
                job.texts.data if isinstance(job, BaseTrainer) else None,
                manifest,
                [row.row for row in read_encoded_rows(store, manifest.step)],
                read_history(store),
                parse_json((output / CONFIG_FILE).read_bytes()),
                [path.name for path in output.iterdir()],
            )
            text = ModelCardText(arguments.push, arguments.license, arguments.base_model)
            with translate_errors(output / CARD_FILE):
                (output / CARD_FILE).write_text(format_model_card(exported, text))
            pushed = repository.push(output, f"Step {manifest.step} of {spec.name}")
            outcome = "pushed" if pushed.has_changed else "nothing to push, the repository already has"
            say(f"{outcome} step {manifest.step} of {directory} at {pushed.url}")
    if arguments.output is not None:
        say(f"exported step {manifest.step} of {directory} to {arguments.output}")
    return EXIT_DONE


@contextlib.contextmanager
def _open_output(output: str | None) -> Iterator[Path]:
    """Yield a directory to write into; it becomes `output` at the end, or is deleted if there is no output."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="export-") as directory:
            yield Path(directory)
        return
    with publish_directory(output) as made:
        yield made


def list_checkpoints(arguments: CheckpointsArguments) -> int:
    """List the checkpoints of a run, verify them if asked to, and return the exit code."""
    with convert_read_errors():
        store = open_store(find_directory(arguments.where))
        if not store.list_names(CHECKPOINTS):
            # A mistyped directory must not pass as a run whose checkpoints are all good. A copy has no `job.json`.
            store = open_run_store(arguments.where)
        # `--deep` includes what `--verify` checks, so it decides last.
        depth = VerifyDepth.FILES if arguments.is_verify else VerifyDepth.MANIFEST
        depth = VerifyDepth.BITS if arguments.is_deep else depth
        lines, code = format_report(store, depth, find_best_name(store))
        write_lines(lines)
    return code


def copy(arguments: CopyArguments) -> int:
    """Copy a checkpoint into another directory or bucket, and verify the copy."""
    with convert_read_errors():
        directory, name = split_checkpoint(arguments.source)
        copied = copy_checkpoint(open_store(directory), name, open_store(arguments.target))
        say(f"copied and verified: {arguments.target.rstrip('/')}/checkpoints/{copied}")
    return EXIT_DONE


def request_steps(arguments: ProfileArguments) -> int:
    """Ask a running job to profile its next steps: leave the request in its directory, and return at once."""
    if not 0 < arguments.steps <= MAX_PROFILE_STEPS:
        raise InvalidError(f"--steps {arguments.steps}: needs a number from 1 to {MAX_PROFILE_STEPS}")
    with convert_read_errors():
        # A request in a directory without a run would never be read, without any message.
        store = open_run_store(arguments.where)
        request_profile(store, arguments.steps)
    say(
        f"requested a profile of {arguments.steps} steps: a running job starts it within {POLL_BUCKET_SECONDS:g} s, "
        f"a stopped one when it runs again; the result will be below {store.url}/{FOLDER}"
    )
    return EXIT_DONE
