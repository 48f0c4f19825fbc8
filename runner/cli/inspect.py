"""Commands that only read, without jax: spec, and what runs have recorded (lineage, metrics, report, dashboard)."""

import json
from importlib import metadata
from pathlib import Path

import runner
from runner.cli.arguments import (
    DashboardArguments,
    LineageArguments,
    MetricsArguments,
    ReportArguments,
    SpecArguments,
)
from runner.cli.status import convert_read_errors, find_directory, open_run_store, validate_new_file, validate_output
from runner.console import say, write_lines, write_text
from runner.dashboard.reader import DiscoveryResult, find_runs
from runner.dashboard.report import write_report
from runner.dashboard.server import serve
from runner.errors import EXIT_DONE, InvalidError, suggest_choices
from runner.history.ledger import to_single_line
from runner.history.lineage import RunLineage, build_tree, format_tree, read_lineage
from runner.history.records import to_json
from runner.history.sweep import SWEEP
from runner.metrics.file import read_encoded_rows
from runner.metrics.rows import format_csv
from runner.storage import DiskError, LocalStore, open_store


def print_spec(arguments: SpecArguments) -> int:
    """Print a spec that comes with the runner, or the name and the first line of each."""
    # A wheel has them as data files; a checkout, also one that is installed as editable, beside the package.
    found = [Path(str(file.locate())) for file in metadata.files("runner") or () if file.match("runner/specs/*.yaml")]
    paths = found or Path(runner.__file__).parents[1].glob("specs/*.yaml")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(paths)}
    if arguments.name is None:
        width = max(map(len, texts))
        lines = (f"{name:{width}}  {text.partition(chr(10))[0].removeprefix('# ')}" for name, text in texts.items())
        write_lines(lines)
    elif arguments.name not in texts:
        raise InvalidError(f"spec {arguments.name}: no such spec{suggest_choices(arguments.name, [*texts])}")
    else:
        write_text(texts[arguments.name], is_program=True)
    return EXIT_DONE


def print_lineage(arguments: LineageArguments) -> int:
    """Print the ancestors of a run, or the trees of all runs below a directory."""
    notes, lineages = list[str](), list[RunLineage]()
    with convert_read_errors():
        root = open_store(find_directory(arguments.where))
        found = find_runs(root) if root.root is None or root.root.is_dir() else DiscoveryResult([], [])
        stores = [run.store for run in found.runs] or [root]
        for store in stores:
            try:
                lineages.append(read_lineage(store))
            except (InvalidError, DiskError) as error:
                # One damaged run must not hide the others.
                if len(stores) == 1:
                    raise
                notes.append(str(error))
        nodes = build_tree(lineages)
    notes += found.notes
    if arguments.as_json:
        write_text(json.dumps({"root": root.url, "runs": to_json(nodes), "notes": notes}) + "\n")
    else:
        for line in (*format_tree(nodes), *(f"cannot read {to_single_line(note)}" for note in notes)):
            if not write_text(line + "\n"):
                break
    return EXIT_DONE


def print_metrics(arguments: MetricsArguments) -> int:
    """Print the metrics of the surviving trajectory, or write them into a file."""
    with convert_read_errors():
        store = open_run_store(arguments.where)
        path = None if arguments.output is None else validate_output(arguments.output, [store])
        rows = list(read_encoded_rows(store))
        lines = format_csv(rows) if arguments.is_csv else (row.text.decode() for row in rows)
        if path is None:
            for line in lines:
                # `runner metrics RUN | head` closes the pipe early, which is not an error.
                if not write_text(line):
                    break
        else:
            LocalStore(path.parent).write_chunks(path.name, (line.encode() for line in lines))
    return EXIT_DONE


def write_report_page(arguments: ReportArguments) -> int:
    """Write one self-contained page about one or several runs."""
    with convert_read_errors():
        stores = [open_store(find_directory(where)) for where in arguments.where]
        # The output is checked first: reading the runs may take a minute.
        below = [run.store for store in stores if store.exists(SWEEP) for run in find_runs(store).runs]
        path = validate_new_file(arguments.output, [*stores, *below])
        num_bytes = write_report(stores, path)
    say(f"{arguments.output}: {num_bytes / 1e6:.1f} MB")
    return EXIT_DONE


def serve_dashboard(arguments: DashboardArguments) -> int:
    """Serve the dashboard of all runs below a directory or URL until the process is asked to stop."""
    root = open_store(arguments.root)
    # A bucket has no directories, so an empty prefix cannot be told from a mistyped one.
    if root.root is not None and not root.root.is_dir():
        raise InvalidError(f"{root.url}: no such directory")
    serve(root, arguments.host, arguments.port, arguments.token)
    return EXIT_DONE
