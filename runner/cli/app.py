"""The command line of `python -m runner`: its commands, their help and exit codes, and `main`."""

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from runner.accelerator import GPU_DEVICES, GPU_PLUGINS, has_device, platform_errors
from runner.cli import arguments as declared
from runner.command_line import CommandLine
from runner.console import finish_output, protect_streams, warn
from runner.distributed.clock import Clock, TimeCategory
from runner.distributed.limits import make_thread_error
from runner.distributed.preemption import StopNotice, end_process
from runner.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INVALID,
    EXIT_PREEMPTED,
    InvalidError,
    RunnerError,
    error_from_exit,
)
from runner.process import STANDBY_VARIABLE

_UNUSABLE_JAX_OPTIONS = ("JAX_DISABLE_JIT", "JAX_NO_EXECUTION", "JAX_NO_TRACING")
_RUN = "SPEC"  # placeholder in the list of commands: a command line that names no command names a spec
_READ_EXIT_CODES = (
    "0 done; 2 invalid command line or spec, or no such run; 76 the storage cannot be reached, or the output "
    "cannot be written."
)

COMMANDS = CommandLine(
    "runner",
    "runner",
    "Run the job that a spec describes, or inspect a run.",
    "`python -m runner COMMAND --help` describes a command and its exit codes. The exit codes of a job are 0 done, 1 "
    "failed, 2 invalid spec or command line, 75 preempted with its state saved, 76 retryable. Any other command that a "
    "signal stops ends with 75.",
    default=_RUN,
)
COMMANDS.add(
    _RUN,
    declared.JobArguments,
    "Run the job of a spec, or resume it",
    "0 the job is done, now or earlier; 1 failed: a bug or diverged training, do not retry; 2 invalid command line, "
    "spec or resume, do not retry; 75 preempted, state saved: run the same command again; 76 retryable failure of "
    "infrastructure: run the same command again, a limited number of times.",
    "Run the same command on every host of the job. Run again, it resumes the newest good checkpoint; once the job is "
    "done, it exits with 0 at once.",
)
COMMANDS.add(
    "plan",
    declared.PlanArguments,
    "Check, size and compile a job before it has hardware",
    "0 the job would run; 2 it would not, or the command line is invalid; 76 the output cannot be written.",
)
COMMANDS.add("status", declared.StatusArguments, "Show where a run stands and where its time went", _READ_EXIT_CODES)
COMMANDS.add(
    "lineage",
    declared.LineageArguments,
    "Show which runs a run was forked from",
    _READ_EXIT_CODES,
    "For a directory that contains several runs, their trees are all shown.",
)
COMMANDS.add("report", declared.ReportArguments, "Write an HTML page about one or several runs", _READ_EXIT_CODES)
COMMANDS.add("dashboard", declared.DashboardArguments, "Serve a live page about all runs below ROOT", _READ_EXIT_CODES)
COMMANDS.add("sample", declared.SampleArguments, "Generate text with a run's weights", _READ_EXIT_CODES)
COMMANDS.add(
    "evaluate",
    declared.EvaluateArguments,
    "Compute the loss of a run's weights on data",
    _READ_EXIT_CODES,
    "Give --coordinator, --num-processes and --process-id to evaluate with several processes.",
)
COMMANDS.add(
    "predict",
    declared.PredictArguments,
    "Write the outputs of a run's model on data",
    "0 written; 2 invalid command line, no such run, or FILE exists; 76 the storage cannot be reached, or the output "
    "cannot be written.",
    "A language model gives the log-probability of each target token. Give --coordinator, --num-processes and "
    "--process-id to compute with several processes.",
)
COMMANDS.add(
    "export",
    declared.ExportArguments,
    "Export weights in Hugging Face's layout",
    "0 exported; 2 invalid command line, no such run, or OUT exists; 76 the storage or the Hub cannot be reached.",
)
COMMANDS.add(
    "checkpoints",
    declared.CheckpointsArguments,
    "List or verify the checkpoints of a run",
    "0 all committed checkpoints are good; 1 one is damaged; 2 a newer version of the runner has written one, or the "
    "command line is invalid; 76 the storage cannot be reached.",
    "`checkpoints copy SOURCE TARGET` copies one.",
)
COMMANDS.add(
    "checkpoints copy",
    declared.CopyArguments,
    "Copy a checkpoint into another run's directory",
    "0 copied and verified; 1 the source is damaged; 2 invalid command line; 76 the storage cannot be reached.",
)
COMMANDS.add(
    "verify-resume",
    declared.VerifyResumeArguments,
    "Prove on this machine that a job resumes bit by bit",
    "0 the bits are the same; 1 they differ, or the job failed; 2 invalid command line or spec; 76 nothing is proved, "
    "run it again.",
    "Runs the job twice in a scratch directory, once undisturbed and once with kills, and compares every checkpoint "
    "and every row of metrics.",
)
COMMANDS.add(
    "schema",
    declared.SchemaArguments,
    "Print the JSON Schema of a spec, for editors",
    "0 printed; 2 invalid command line or spec; 76 the output cannot be written.",
)
COMMANDS.add(
    "spec",
    declared.SpecArguments,
    "Print a spec that comes with the runner, or list them",
    "0 printed; 2 no such spec; 76 the output cannot be written.",
)
COMMANDS.add(
    "init",
    declared.InitArguments,
    "Write a model and a spec of your own to begin with",
    "0 written; 2 invalid command line or name, or a file is there already.",
    "Writes NAME.py and NAME.yaml into the working directory, and overwrites nothing.",
)
COMMANDS.add(
    "spec-from",
    declared.SpecFromArguments,
    "Write a spec that starts from published weights",
    "0 written; 2 invalid command line, weights or hardware; 76 the storage cannot be reached, or the output cannot be "
    "written.",
    "The spec is complete and commented. Its mesh, micro-batch and memory policy are chosen by arithmetic; no "
    "accelerator is needed.",
)
COMMANDS.add(
    "scale",
    declared.ScaleArguments,
    "Write a decoder's spec in another size, by its depth",
    "0 written; 2 invalid command line, or no decoder whose size follows from its depth; 76 the output cannot be "
    "written.",
    "Width, heads, tokens, steps, batch and learning rate follow from the depth. A comment states each rule.",
)
COMMANDS.add(
    "explain",
    declared.ExplainArguments,
    "Show what a training step saw, and what each example cost",
    _READ_EXIT_CODES,
    "Repeats the steps from the newest checkpoint before it in a scratch directory. The run is only read.",
)
COMMANDS.add(
    "replay",
    declared.ReplayArguments,
    "Compute a step of a run again, and compare",
    "0 the bits are the same, or the losses within rounding where other hardware is used; 1 they differ; 2 invalid "
    "command line, no such run or step, or it cannot run here; 76 the storage cannot be reached.",
    "Repeats the steps from the newest checkpoint before it in a scratch directory. The run is only read.",
)
COMMANDS.add(
    "trial",
    declared.TrialArguments,
    "Try a change on the next steps of a run",
    "0 keep the change: it is better, or no worse by more than the margin; 1 it is worse, or a fork failed; 2 invalid "
    "command line, a fork is refused, or the steps are too few to tell; 75 and 76: run the same command again.",
    "Forks the run at a checkpoint without and with the change, and compares both on the same batches. The run is only "
    "read. Interrupted, the same command goes on.",
)
COMMANDS.add(
    "bundle",
    declared.BundleArguments,
    "Write an archive with which others can check a run",
    "0 written; 2 invalid command line, or no such run; 76 the storage cannot be reached, or the output cannot be "
    "written.",
    "It holds the spec, the rows, fingerprints, digests of the data and versions: no weights, and no data.",
)
COMMANDS.add(
    "reproduce",
    declared.ReproduceArguments,
    "Run the job of a bundle again, and compare",
    "0 every save that was compared is identical, or the losses within rounding where hardware or versions differ; 1 "
    "they differ; 2 invalid command line or bundle, other data, or it cannot run here; 75 and 76: run the same command "
    "again.",
    "Ends at the first save that differs. Interrupted, the same command goes on.",
)
COMMANDS.add("metrics", declared.MetricsArguments, "Print the metrics of a run as JSON or CSV", _READ_EXIT_CODES)
COMMANDS.add(
    "profile",
    declared.ProfileArguments,
    "Ask a running job to profile its next steps",
    _READ_EXIT_CODES,
    "Writes a request into the run's directory and returns; the job reads it at its next steps.",
)

# Module and function of each command. Most modules import jax, so each is imported by its name when its command runs. A
# job is run by `_run_job`.
_IMPLEMENTATIONS = {
    declared.PlanArguments: ("runner.cli.plan", "print_plan"),
    declared.StatusArguments: ("runner.cli.status", "print_status"),
    declared.LineageArguments: ("runner.cli.inspect", "print_lineage"),
    declared.ReportArguments: ("runner.cli.inspect", "write_report_page"),
    declared.DashboardArguments: ("runner.cli.inspect", "serve_dashboard"),
    declared.SampleArguments: ("runner.cli.checkpoints", "print_sample"),
    declared.EvaluateArguments: ("runner.cli.checkpoints", "print_evaluation"),
    declared.PredictArguments: ("runner.cli.checkpoints", "write_predictions"),
    declared.ExportArguments: ("runner.cli.checkpoints", "export"),
    declared.CheckpointsArguments: ("runner.cli.checkpoints", "list_checkpoints"),
    declared.CopyArguments: ("runner.cli.checkpoints", "copy"),
    declared.VerifyResumeArguments: ("runner.cli.verify_resume", "verify_resume"),
    declared.SchemaArguments: ("runner.cli.plan", "print_schema"),
    declared.SpecArguments: ("runner.cli.inspect", "print_spec"),
    declared.InitArguments: ("runner.cli.init", "write_first_files"),
    declared.SpecFromArguments: ("runner.cli.plan", "write_spec_from"),
    declared.ScaleArguments: ("runner.cli.plan", "write_scaled_spec"),
    declared.ExplainArguments: ("runner.cli.retrace", "print_explanation"),
    declared.ReplayArguments: ("runner.cli.retrace", "print_replay"),
    declared.TrialArguments: ("runner.cli.retrace", "print_trial"),
    declared.BundleArguments: ("runner.cli.retrace", "write_bundle"),
    declared.ReproduceArguments: ("runner.cli.retrace", "print_reproduction"),
    declared.MetricsArguments: ("runner.cli.inspect", "print_metrics"),
    declared.ProfileArguments: ("runner.cli.checkpoints", "request_steps"),
}


# Settings of JAX for the checks of one's own code, and the values with which optax, flax, Orbax and this project work.
# They change no bit of what passes them.
_RELAXED = {
    "jax_numpy_rank_promotion": "allow",
    "jax_numpy_dtype_promotion": "standard",
    "jax_transfer_guard_host_to_device": "allow",
    "jax_transfer_guard_device_to_device": "allow",
    "jax_transfer_guard_device_to_host": "allow",
    "jax_transfer_guard": "allow",
    "jax_array_garbage_collection_guard": "allow",
    "jax_thread_guard": False,
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_error_checking_behavior_divide": "ignore",
}


def run_command(words: Sequence[str]) -> int:
    """Parse and carry out any command but that of a job, and return its exit code. Raises SystemExit after `--help`."""
    return _carry_out(COMMANDS.parse(words))


def run_program() -> int:
    """Carry out the command line of this process, and return its exit code. Call it before anything opens a file."""
    protect_streams()
    descriptor = os.environ.pop(STANDBY_VARIABLE, None)
    if descriptor is None:
        return main(sys.argv[1:], Clock.since_process_start())
    # An idle standby ends at Ctrl-C without a traceback, and writes no core at SIGQUIT. Handlers replace both later.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    _import("runner.trainer")  # which imports almost everything that a job needs until its first step
    _import("grain")  # for the order of the data
    sys.argv[1:] = _import("runner.cli.run").wait_for_arguments(int(descriptor))
    # The time of this process begins now.
    return main(sys.argv[1:], Clock(0.0, TimeCategory.PROCESS_START))


def main(words: Sequence[str], clock: Clock | None = None) -> int:
    """Parse and carry out a command line, and return its exit code. A job ends the process by itself.

    `clock` has counted the time until now; by default it counts from the creation of this process.
    """
    clock = clock or Clock.since_process_start()
    stop = StopNotice(clock)
    # A stop may be requested in every phase, so install the handlers before anything that takes time.
    try:
        stop.install_signal_handlers()
    except RuntimeError:  # no thread can be started
        warn(str(make_thread_error(0, 1)))
        return EXIT_INVALID
    # The user's job class is found from the working directory, also by the console script.
    with contextlib.suppress(ValueError):
        sys.path.remove("")
    try:
        # Unless it was put behind other directories on purpose (`make_code_environment`).
        if not (sys.flags.safe_path and os.getcwd() in sys.path):
            sys.path.insert(0, os.getcwd())
    except FileNotFoundError:
        warn("the working directory was removed; change to a directory that exists")
        return EXIT_INVALID
    try:
        try:
            arguments = COMMANDS.parse(words)
        except SystemExit as end:  # after --help
            finish_output()
            return int(end.code or EXIT_DONE)
    except RunnerError as error:
        warn(str(error))
        return error.exit_code
    try:
        with platform_errors():
            if isinstance(arguments, declared.JobArguments):
                _run_job(arguments, stop, clock)
                return EXIT_DONE
            stop.interrupt_command()
            return _carry_out(arguments)
    except KeyboardInterrupt as interrupt:
        # At once, since threads of libraries may still be at work.
        end_process(EXIT_PREEMPTED, str(interrupt))
    except RunnerError as error:
        warn(str(error))
        return error.exit_code
    except SystemExit as error:  # raised by the job's own code
        warn(str(error_from_exit(error)))
        return EXIT_FAILED


def _carry_out(arguments: object) -> int:
    # The class of the arguments identifies the command, so its words are parsed in one place only.
    module, function = _IMPLEMENTATIONS[type(arguments)]
    try:
        return int(getattr(_import(module), function)(arguments))
    except (RunnerError, OSError):
        raise
    except Exception as error:
        report = _import("runner.cli.traceback")
        if not report.has_own_frames(error):
            raise
        warn(report.format_bug(error))
        return EXIT_FAILED


def _run_job(arguments: declared.JobArguments, stop: StopNotice, clock: Clock) -> None:
    # A spec that cannot be read is reported before jax is imported, which takes seconds.
    spec_package = _import("runner.spec")
    document = spec_package.load_document(arguments.spec, arguments.all_overrides)
    try:
        spec = spec_package.validate_spec(document)
    except RunnerError as error:
        # All problems at once. Those of `config` need the class of the job, which imports jax.
        checks = _import("runner.plan.checks")
        findings = checks.Findings()
        checks.open_job(document, findings)
        raise InvalidError("\n".join(findings.problems)) from error
    _import("runner.cli.run").run(arguments, document, spec, stop, clock)


def _import(module: str) -> Any:
    """Import a module, which may import jax. Raises InvalidError if an environment variable keeps jax from working."""
    try:
        # JAX's plugin for GPUs, installed where there is none.
        is_plugin_idle = not has_device(GPU_DEVICES) and any(map(find_spec, GPU_PLUGINS))
        if is_plugin_idle and os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # which JAX sets
            os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # no warnings, of which some are about the GPU that is not there
        with _discard_messages() if is_plugin_idle else contextlib.nullcontext():
            found = importlib.import_module(module)
            if is_plugin_idle and "runner.jax_internals" in sys.modules:
                sys.modules["runner.jax_internals"].discover_plugins()
    except ValueError as error:
        # JAX checks its variables when it is imported, and its message names the wrong one.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith("jax."):
            raise
        raise InvalidError(f"environment: {error}; correct that variable, or unset it") from error
    if "jax" in sys.modules:
        config = sys.modules["jax"].config
        for name in _UNUSABLE_JAX_OPTIONS:
            if getattr(config, name.lower()):
                reason = "the runner traces its programs, compiles them ahead of time, and runs them"
                raise InvalidError(f"environment: {name} is set, and {reason}; unset it")
        # The guard of all transfers comes last, since it sets the others.
        given = {name: getattr(config, name) for name in _RELAXED if name.upper() in os.environ}
        changed = [name for name, value in given.items() if str(getattr(value, "value", value)) != str(_RELAXED[name])]
        for name in _RELAXED if changed else ():
            config.update(name, _RELAXED[name])
        if changed:
            named = ", ".join(f"{name.upper()}={os.environ[name.upper()]}" for name in changed)
            warn(f"environment: {named}: not applied, because JAX's own libraries do not pass such a check; unset it")
    return found


@contextlib.contextmanager
def _discard_messages() -> Iterator[None]:
    """Discard what libraries write to standard error, such as JAX's plugins that there is no GPU."""
    protected = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(protected, 2)
        os.close(protected)
