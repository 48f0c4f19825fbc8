"""The commands `explain`, `replay`, `bundle` and `reproduce`. The run that they are about is only read."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from runner.attempts.layout import read_owner
from runner.cli.arguments import BundleArguments, ExplainArguments, ReplayArguments, ReproduceArguments
from runner.cli.status import convert_read_errors, find_run, open_run_store, validate_output
from runner.console import escape_controls, say, silence, write_lines, write_text
from runner.data.readers import publish
from runner.errors import EXIT_DONE, EXIT_FAILED, InvalidError
from runner.history.reader import HistoryReader
from runner.history.records import History, to_json
from runner.retrace.bundle import make_bundle, reproduce
from runner.retrace.explain import Explainer, find_spike
from runner.retrace.replay import replay
from runner.retrace.scratch import RetraceRequest, choose_checkpoint, open_job, retrace, validate_step
from runner.storage import Store, open_store


@dataclass(frozen=True)
class _Subject:
    """Run that a command is about."""

    directory: str
    trust: Sequence[str]
    store: Store
    history: History

    def make_request(self, step: int, arguments: ExplainArguments | ReplayArguments) -> RetraceRequest:
        return RetraceRequest(self.directory, step, arguments.overrides, arguments.is_any_device, self.trust)


def _open(arguments: ExplainArguments | ReplayArguments) -> _Subject:
    directory, trust = find_run(arguments.where, arguments.trust)
    store = open_run_store(arguments.where)
    return _Subject(directory, trust, store, HistoryReader(store).read())


def _quiet_if(as_json: bool) -> contextlib.AbstractContextManager[None]:
    return silence() if as_json else contextlib.nullcontext()


def print_replay(arguments: ReplayArguments) -> int:
    """Repeat the steps of a run to one of them, compare them with its records, and print the verdict."""
    with convert_read_errors():
        run = _open(arguments)
        step = choose_checkpoint(run.store) if arguments.step is None else arguments.step
        validate_step(run.store, step, run.history.step)
        with _quiet_if(arguments.as_json), retrace(run.make_request(step, arguments)) as retracing:
            result = replay(retracing, step, run.history, arguments.is_inspected)
        if arguments.as_json:
            write_text(json.dumps(to_json(result.to_json())) + "\n")
        else:
            write_lines(escape_controls(line) for line in result.format())
    return EXIT_FAILED if result.verdict == "different" else EXIT_DONE


def print_explanation(arguments: ExplainArguments) -> int:
    """Print what steps of a run have seen and what their examples cost; with `--json` an object for each step."""
    with convert_read_errors():
        run = _open(arguments)
        job = open_job(run.directory, run.trust)
        explainer = Explainer(job, run.history)
        if arguments.range is None:
            first = last = find_spike(explainer.rows, job.config, run.store.url).step
        else:
            first, last = arguments.range
        for step in (first, last):
            validate_step(run.store, step, run.history.step)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet_if(arguments.as_json))
            retracing = None
            if not arguments.is_data_only:
                retracing = stack.enter_context(retrace(run.make_request(first, arguments)))
            for step in range(first, last + 1):
                explanation = explainer.explain(step, retracing, arguments.top)
                if arguments.as_json:
                    write_text(json.dumps(to_json(explanation.to_json())) + "\n")
                else:
                    write_lines(escape_controls(line) for line in explanation.format(arguments.top))
    return EXIT_DONE


def write_bundle(arguments: BundleArguments) -> int:
    """Write the archive of a run."""
    with convert_read_errors():
        directory, trust = find_run(arguments.where, arguments.trust)
        store = open_store(directory)
        path = validate_output(arguments.output, [store])
        if not path.parent.is_dir():
            raise InvalidError(f"-o {arguments.output}: needs the name of a file in a directory that exists")
        owner = read_owner(open_run_store(arguments.where))
        assert owner is not None, "the directory holds a run"
        content = make_bundle(store, trust, owner.name, owner.id)
        publish(path, [content])
    say(f"{arguments.output}: {len(content) / 1e3:.0f} kB")
    say(f"to check it: python -m runner reproduce {arguments.output} -o DIRECTORY")
    return EXIT_DONE


def print_reproduction(arguments: ReproduceArguments) -> int:
    """Run the job of a bundle in a directory, compare its saves with those of the bundle, and print the verdict."""
    with convert_read_errors():
        with _quiet_if(arguments.as_json):
            found = reproduce(
                arguments.bundle, arguments.directory, arguments.overrides, arguments.is_any_device, arguments.trust
            )
        if arguments.as_json:
            write_text(json.dumps(to_json(found.to_json())) + "\n")
        else:
            write_lines(escape_controls(line) for line in found.format())
    return EXIT_DONE if found.verdict in ("identical", "within rounding") else EXIT_FAILED
