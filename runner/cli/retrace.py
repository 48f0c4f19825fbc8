"""The commands `explain`, `replay`, `trial`, `bundle` and `reproduce`. The run that they are about is only read."""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.cli.arguments import BundleArguments, ExplainArguments, ReplayArguments, ReproduceArguments, TrialArguments
from runner.cli.status import convert_read_errors, find_run, open_run_store, validate_new_file
from runner.console import escape_unprintable, say, silence, warn, write_lines, write_text
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, InvalidError
from runner.history.reader import HistoryReader
from runner.history.records import History, to_json
from runner.process import make_code_environment
from runner.retrace.against import RunsComparison, StepComputer, compare_runs
from runner.retrace.bundle import Reproduction, find_missing_code, install_environment, make_bundle, reproduce
from runner.retrace.explain import Explainer, Explanation, find_spike
from runner.retrace.judge import parse_criteria
from runner.retrace.picture import render_inspection
from runner.retrace.replay import ReplayResult, replay
from runner.retrace.scratch import (
    RetraceRequest,
    choose_checkpoint,
    open_job,
    retrace,
    scratch_directory,
    validate_step,
)
from runner.retrace.side import CodeComputer, compute_side, extract_commit
from runner.retrace.trial import TrialRequest, TrialResult, adopt, advise_stages, run_trial
from runner.spec import load_document, validate_spec
from runner.spec.document import format_trust
from runner.storage import LocalStore, Store, local_directory


@dataclass(frozen=True)
class _Subject:
    """Run that a command is about."""

    directory: str
    trust: Sequence[str]
    store: Store
    history: History
    overrides: Sequence[str]

    def make_request(self, step: int, arguments: ExplainArguments | ReplayArguments) -> RetraceRequest:
        return RetraceRequest(self.directory, step, self.overrides, arguments.is_any_device, self.trust)


def _locate(where: str, trusted: Sequence[str], overrides: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the directory of a run, its trusted modules, and the overrides of other keys than the directory."""
    directory, trust = find_run(where, trusted)
    given = [override for override in overrides if override.partition("=")[0].strip() == "directory"]
    if given and directory == where:
        raise InvalidError(
            f"--set {given[-1]}: {where} is the directory of a run; give the other directory in its place"
        )
    if given:
        directory = str(validate_spec(load_document(where, given)).directory)
    return directory, trust, [override for override in overrides if override not in given]


def _open(where: str, trusted: Sequence[str], overrides: Sequence[str]) -> _Subject:
    directory, trust, others = _locate(where, trusted, overrides)
    store = open_run_store(directory)
    return _Subject(directory, trust, store, HistoryReader(store).read(), others)


def _validate_code(directory: str, option: str) -> str:
    if not os.path.isdir(directory):
        raise InvalidError(f"{option} {directory}: needs a directory")
    return os.path.abspath(directory)


def _use_code(directory: str | None) -> None:
    """Let this process begin again with the modules of a directory first, unless it has done so. May not return."""
    if directory is None:
        return
    _validate_code(directory, "--code")
    if os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != os.path.abspath(directory):
        variables = make_code_environment(directory)
        os.execve(sys.executable, [sys.executable, "-m", "runner", *sys.argv[1:]], variables)


def _quiet_if(as_json: bool) -> contextlib.AbstractContextManager[None]:
    return silence() if as_json else contextlib.nullcontext()


_Result = ReplayResult | RunsComparison | Explanation | Reproduction | TrialResult


def _write(as_json: bool, found: _Result, lines: Iterable[str]) -> None:
    """Print a result as JSON, or as lines that cannot control the terminal, whatever a run or a bundle holds."""
    if as_json:
        write_text(json.dumps(to_json(found.to_json())) + "\n")
    else:
        write_lines(map(escape_unprintable, lines))


def print_replay(arguments: ReplayArguments) -> int:
    """Repeat the steps of a run to one of them, compare them with its records, and print the verdict."""
    if arguments.side is not None:
        with convert_read_errors():
            return compute_side(Path(arguments.side))
    _use_code(arguments.code)
    if arguments.against is not None:
        return _print_comparison(arguments, arguments.against)
    with convert_read_errors():
        run = _open(arguments.where, arguments.trust, arguments.overrides)
        step = choose_checkpoint(run.store) if arguments.step is None else arguments.step
        validate_step(run.store, step, run.history.step)
        path = None if arguments.save is None else validate_new_file(arguments.save, [run.store], "--save")
        if path is not None and path.exists():
            raise InvalidError(f"--save {arguments.save}: is there already; use another name")
        page = None if arguments.page is None else validate_new_file(arguments.page, [run.store], "--page")
        with _quiet_if(arguments.as_json), retrace(run.make_request(step, arguments)) as retracing:
            result = replay(retracing, step, run.history, arguments.is_inspected, path)
        if page is not None and result.inspection is not None:
            text = render_inspection(f"step {step} of {run.store.url}", result.inspection)
            LocalStore(page.parent).write(page.name, text.encode())
        _write(arguments.as_json, result, result.format())
    return EXIT_FAILED if result.verdict == "different" else EXIT_DONE


def _print_comparison(arguments: ReplayArguments, against: str) -> int:
    """Repeat the steps of two runs, and print where they differ first."""
    with convert_read_errors():
        runs = [
            _open(arguments.where, arguments.trust, arguments.overrides),
            _open(against, arguments.trust, arguments.against_overrides),
        ]
        assert arguments.step is not None, "refused by the arguments"
        for run in runs:
            validate_step(run.store, 1 if run is runs[1] else arguments.step, run.history.step)
        # The second run may be shorter.
        step = min(arguments.step, runs[1].history.step)
        first, second = (run.make_request(step, arguments) for run in runs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet_if(arguments.as_json))
            computer, notes = StepComputer(), list[str]()
            if arguments.against_code is not None or arguments.against_commit is not None:
                scratch = stack.enter_context(scratch_directory())
                if arguments.against_commit is not None:
                    code = str(scratch / "code")
                    code_name = f"commit {extract_commit(arguments.against_commit, scratch / 'code')}"
                else:
                    code = code_name = _validate_code(arguments.against_code or "", "--against-code")
                computer = CodeComputer(scratch / "sides", code_name, arguments.as_json)
                second, notes = replace(second, code=code), [f"the second run has the code of {code_name}"]
            found = compare_runs((first, second), step, computer)
            found = replace(found, notes=[*notes, *found.notes])
        _write(arguments.as_json, found, found.format())
    return EXIT_FAILED if found.verdict == "different" else EXIT_DONE


def print_explanation(arguments: ExplainArguments) -> int:
    """Print what steps of a run have seen and what their examples cost; with `--json` an object for each step."""
    _use_code(arguments.code)
    with convert_read_errors():
        run = _open(arguments.where, arguments.trust, arguments.overrides)
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
                _write(arguments.as_json, explanation, explanation.format(arguments.top))
    return EXIT_DONE


def print_trial(arguments: TrialArguments) -> int:
    """Try a change of a run in two forks, print the verdict, and write the spec that goes on with the change."""
    with convert_read_errors():
        url, trust, overrides = _locate(arguments.where, arguments.trust, arguments.overrides)
        store, given = open_run_store(url), arguments.directory
        if given is None and store.root is None:
            raise InvalidError(f"{store.url}: is in a bucket; needs -o DIR, a directory of this machine")
        path = Path(f"{store.root}.trial") if given is None else local_directory(given)
        if store.root is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(store.root)):
            raise InvalidError(f"-o {given}: lies in the run {store.url}; use another directory")
        request = TrialRequest(
            url,
            path.absolute(),
            arguments.num_steps,
            arguments.step,
            overrides,
            arguments.code and os.path.abspath(arguments.code),
            arguments.python,
            parse_criteria(arguments.judges),
            arguments.is_any_device,
            trust,
        )
        adopted = None if arguments.adopted is None else validate_new_file(arguments.adopted, [store], "--adopt")
        with _quiet_if(arguments.as_json):
            found = run_trial(request)
        _write(arguments.as_json, found, found.format())
        is_kept = found.verdict in ("keep", "same bits")
        if is_kept and adopted is not None:
            LocalStore(adopted.parent).write(adopted.name, adopt(request, found.start).encode())
        if is_kept and not arguments.as_json:
            name = arguments.adopted or "FILE, which the same command with --adopt FILE writes"
            say(f"to go on with the change in its fork: python -m runner {name}")
            if request.code is not None:
                say(f"with the modules of {request.code} before others, as by PYTHONPATH")
            if (advice := advise_stages(request)) is not None:
                say(advice.format())
    return EXIT_DONE if is_kept else EXIT_INVALID if found.verdict == "unclear" else EXIT_FAILED


def write_bundle(arguments: BundleArguments) -> int:
    """Write the archive of a run."""
    with convert_read_errors():
        _, trust = find_run(arguments.where, arguments.trust)
        store = open_run_store(arguments.where)
        path = validate_new_file(arguments.output, [store])
        content = make_bundle(job := open_job(store.url, trust))
        LocalStore(path.parent).write(path.name, content)
    say(f"{arguments.output}: {len(content) / 1e3:.0f} kB")
    if (missing := find_missing_code(job)) is not None:
        warn(f"{missing} is in no commit, and not in the bundle; give it to the readers too")
    trusted = format_trust(job.document.data)
    say(f"to check it: python -m runner reproduce {arguments.output} -o DIRECTORY{trusted}")
    return EXIT_DONE


def print_reproduction(arguments: ReproduceArguments) -> int:
    """Run the job of a bundle in a directory, compare its saves with those of the bundle, and print the verdict."""
    with convert_read_errors():
        with _quiet_if(arguments.as_json):
            python = install_environment(arguments.bundle) if arguments.is_installing else None
        if python is not None:
            # As it was called, but for the option; its exit code is that of this command.
            words = [word for word in sys.argv[1:] if word != "--install"]
            os.execv(python, [str(python), "-m", "runner", *words])
        with _quiet_if(arguments.as_json):
            found = reproduce(
                arguments.bundle, arguments.directory, arguments.overrides, arguments.is_any_device, arguments.trust
            )
        _write(arguments.as_json, found, found.format())
    return EXIT_DONE if found.verdict in ("identical", "within rounding") else EXIT_FAILED
