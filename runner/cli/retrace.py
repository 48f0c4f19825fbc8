"""The commands `explain` and `replay`, which repeat steps of a run beside it. The run is only read."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from runner.cli.arguments import ExplainArguments, ReplayArguments
from runner.cli.status import convert_read_errors, find_run, open_run_store
from runner.console import escape_controls, silence, write_lines, write_text
from runner.errors import EXIT_DONE, EXIT_FAILED
from runner.history.reader import HistoryReader
from runner.history.records import History
from runner.retrace.explain import Explainer, find_spike
from runner.retrace.replay import replay
from runner.retrace.scratch import RetraceRequest, open_job, retrace, validate_step
from runner.storage import Store


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
        validate_step(run.store, arguments.step, run.history.step)
        with _quiet_if(arguments.as_json), retrace(run.make_request(arguments.step, arguments)) as retracing:
            result = replay(retracing, arguments.step, run.history)
        if arguments.as_json:
            write_text(json.dumps(result.to_json()) + "\n")
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
                    write_text(json.dumps(explanation.to_json()) + "\n")
                else:
                    write_lines(escape_controls(line) for line in explanation.format(arguments.top))
    return EXIT_DONE
