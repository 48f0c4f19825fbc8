"""Arguments and options of each command of `python -m runner`.

This module contains only declarations, so that `--help` and errors in options do not import jax. `runner.command_line`
parses each class, and `runner.cli.app` names the function that takes it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import typer

from runner.command_line import (
    Coordinator,
    HeadSize,
    NumProcesses,
    ProcessId,
    TakeOver,
    TokensPerParameter,
    WidthPerLayer,
    parse_depths,
    parse_numbers,
    validate_placement,
)
from runner.errors import InvalidError
from runner.spec import PARAMS

SpecPath = Annotated[str, typer.Argument(metavar="SPEC", help="Path of the job's spec, a YAML file.")]
RunLocation = Annotated[str, typer.Argument(metavar="SPEC_OR_DIRECTORY", help="Spec, directory or URL of a run.")]
RunOrRoot = Annotated[
    str, typer.Argument(metavar="DIRECTORY", help="Spec, directory or URL of a run, or a directory of runs.")
]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key of the spec with a YAML value; repeatable."),
]
WeightsName = Annotated[
    str, typer.Option("--weights", metavar="W", help="Trained weights (params), or an average of them (ema_0.999).")
]
TrustedModules = Annotated[
    list[str],
    typer.Option(
        "--trust",
        metavar="MODULE",
        help="Module, with its submodules, whose classes the run's directory may name; repeatable. Those of this "
        "project, and those that your own SPEC names, need none.",
    ),
]
StepName = Annotated[str, typer.Option(metavar="N", help="Checkpoint: newest, best, or the number of a step.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """Arguments of `python -m runner SPEC`."""

    spec: SpecPath
    overrides: Overrides = field(default_factory=list)
    profile: Annotated[
        str | None,
        typer.Option(metavar="START:STOP", help="Profile these steps: short for --set logging.profile=START:STOP."),
    ] = None
    is_take_over: TakeOver = False
    coordinator: Coordinator = None
    num_processes: NumProcesses = None
    process_id: ProcessId = None

    def __post_init__(self) -> None:
        validate_placement(self.coordinator, self.num_processes, self.process_id)

    @property
    def all_overrides(self) -> list[str]:
        """Overrides of the spec, that of `--profile` included."""
        return self.overrides + ([] if self.profile is None else [f"logging.profile={self.profile}"])


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Arguments of `plan`."""

    spec: SpecPath
    topology: Annotated[
        str | None,
        typer.Option(metavar="ACCELERATOR", help="Plan for this hardware instead of the spec's topology.accelerator."),
    ] = None
    as_json: AsJson = False
    overrides: Overrides = field(default_factory=list)
    is_quick: Annotated[bool, typer.Option("--quick", help="Only check: compile nothing.")] = False
    is_anyway: Annotated[
        bool, typer.Option("--anyway", help="Compile and size the job also if a check fails, such as that of its data.")
    ] = False
    is_search: Annotated[
        bool, typer.Option("--search", help="Rank meshes, micro-batch sizes and the choices that the job declares.")
    ] = False
    chips: Annotated[
        Literal["auto"] | None,
        typer.Option(metavar="auto", help="Find the smallest slice that finishes the run within --hours."),
    ] = None
    hours: Annotated[float | None, typer.Option(metavar="H", help="Time limit of the run, for --chips auto.")] = None
    minutes: Annotated[
        float | None,
        typer.Option(metavar="M", help="With --search or --chips: end after this time, with what has been compiled."),
    ] = None
    is_profile: Annotated[
        bool, typer.Option("--profile", help="List the operations of the step with their time and memory.")
    ] = False
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --profile: write the schedule for Perfetto.")
    ] = None
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="With --profile: compare with the step times of a run's directory."),
    ] = None
    is_variants: Annotated[bool, typer.Option("--variants", hidden=True, help="For launch sweep.")] = False

    def __post_init__(self) -> None:
        if (self.chips is None) != (self.hours is None) or (self.hours is not None and not self.hours > 0):
            raise InvalidError("--chips auto needs --hours H, a positive number, and --hours needs --chips auto")
        if self.minutes is not None and not (self.minutes > 0 and (self.is_search or self.hours is not None)):
            raise InvalidError("--minutes M needs a positive number, and --search or --chips auto")
        if (self.trace is not None or self.against is not None) and not self.is_profile:
            raise InvalidError("--trace FILE and --against RUN need --profile")
        if self.is_quick and (self.is_profile or self.is_search or self.hours is not None):
            raise InvalidError("--quick compiles nothing; leave out --profile, --search and --chips")
        if self.is_profile and (self.is_search or self.hours is not None):
            raise InvalidError("--profile describes one plan; leave out --search and --chips")


@dataclass(frozen=True, kw_only=True)
class StatusArguments:
    """Arguments of `status`."""

    where: RunOrRoot
    as_json: Annotated[bool, typer.Option("--json", help="Print the history as one line of JSON.")] = False
    is_watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds until the run is done.")] = False
    hosts: Annotated[
        bool, typer.Option("--hosts", help="List the hosts of the run, or of all runs below the directory.")
    ] = False

    def __post_init__(self) -> None:
        if self.hosts and self.is_watch:
            raise InvalidError("--hosts and --watch exclude each other; give one of them")


@dataclass(frozen=True, kw_only=True)
class LineageArguments:
    """Arguments of `lineage`."""

    where: RunOrRoot
    as_json: Annotated[bool, typer.Option("--json", help="Print the tree as one line of JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Arguments of `report`."""

    where: Annotated[
        list[str], typer.Argument(metavar="SPEC_OR_DIRECTORY...", help="Specs, directories or URLs of runs.")
    ]
    output: Annotated[str, typer.Option("-o", "--output", metavar="OUT", help="Page to write, such as report.html.")]


@dataclass(frozen=True, kw_only=True)
class DashboardArguments:
    """Arguments of `dashboard`."""

    root: Annotated[str, typer.Argument(metavar="ROOT", help="Directory or URL that has the runs below it.")]
    port: Annotated[int, typer.Option(metavar="P", help="Port to listen on; 0 takes a free one.")] = 8642
    host: Annotated[str, typer.Option(metavar="H", help="Address to listen on; the default serves this machine.")] = (
        "127.0.0.1"
    )
    token: Annotated[
        str | None,
        typer.Option(
            metavar="T", help="Token that a browser must present. Default: a new one if others can reach the server."
        ),
    ] = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidError(f"--port {self.port}: needs a number from 0 to 65535")


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """Arguments of `sample`; the defaults are those of `runner.inference.open_run.SampleRequest`."""

    where: RunLocation
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text that the model continues.")] = ""
    is_chat: Annotated[
        bool,
        typer.Option("--chat", help="Answer --prompt as the message of a user, by the run's chat template."),
    ] = False
    step: StepName = "newest"
    weights: WeightsName = PARAMS
    num_tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Number of tokens to generate.")] = 200
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Divisor of the logits; 0 always takes the most probable token.")
    ] = 0.8
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Sample from the most probable tokens that together have probability P.")
    ] = 1.0
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the random numbers.")] = 0
    trust: TrustedModules = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments:
    """Arguments of `evaluate`."""

    where: RunLocation
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Data, in the form of config.data.validation. Default: the run's validation sets."
        ),
    ] = None
    step: Annotated[
        str | None,
        typer.Option(metavar="N", show_default="newest", help="Checkpoint: newest, best, or the number of a step."),
    ] = None
    is_every_step: Annotated[bool, typer.Option("--all", help="Evaluate every checkpoint.")] = False
    weights: WeightsName = PARAMS
    is_follow: Annotated[
        bool, typer.Option("--follow", help="Evaluate every checkpoint as the run commits it, until the run is done.")
    ] = False
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="With --follow: file to append a JSON object per checkpoint to; steps that it has are skipped. With "
            "--save-top-k: directory or URL of the corpus to write; an interrupted one is continued.",
        ),
    ] = None
    save_top_k: Annotated[
        int | None,
        typer.Option(
            "--save-top-k",
            min=1,
            metavar="K",
            help="Write a corpus with the K most likely tokens at the place of each token of --data, to distil from.",
        ),
    ] = None
    harness: Annotated[
        str | None,
        typer.Option(metavar="TASKS", help="Run these tasks of lm-evaluation-harness, separated by commas, instead."),
    ] = None
    include_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="With --harness: directory of your own tasks.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per checkpoint, at full precision.")] = (
        False
    )
    trust: TrustedModules = field(default_factory=list)
    coordinator: Coordinator = None
    num_processes: NumProcesses = None
    process_id: ProcessId = None

    def __post_init__(self) -> None:
        validate_placement(self.coordinator, self.num_processes, self.process_id)
        if (self.step is not None) + self.is_every_step + self.is_follow > 1:
            raise InvalidError("--step, --all and --follow exclude each other; give one of them")
        if self.output is not None and not self.is_follow and self.save_top_k is None:
            raise InvalidError("--output OUT needs --follow or --save-top-k")
        if self.save_top_k is not None and (not self.data or self.output is None):
            raise InvalidError("--save-top-k needs --data SOURCE and -o OUT")
        if self.save_top_k is not None and (self.is_every_step or self.is_follow or self.harness is not None):
            raise InvalidError(
                "--save-top-k writes the predictions of one step; leave --all, --follow and --harness out"
            )
        if self.include_path is not None and self.harness is None:
            raise InvalidError("--include-path DIR needs --harness TASKS")
        if self.harness is not None and self.data:
            raise InvalidError("--harness excludes --data: each task has data of its own")
        if self.harness is not None and self.weights != PARAMS:
            raise InvalidError(f"--harness evaluates {PARAMS} only; leave --weights out")


@dataclass(frozen=True, kw_only=True)
class PredictArguments:
    """Arguments of `predict`."""

    where: RunLocation
    data: Annotated[str, typer.Option(metavar="SOURCE", help="Data, in the form of config.data.validation.")]
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File to create: .jsonl, one JSON object per example, or .npz, one array of NumPy per output.",
        ),
    ]
    step: StepName = "newest"
    weights: WeightsName = PARAMS
    trust: TrustedModules = field(default_factory=list)
    coordinator: Coordinator = None
    num_processes: NumProcesses = None
    process_id: ProcessId = None

    def __post_init__(self) -> None:
        validate_placement(self.coordinator, self.num_processes, self.process_id)


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Arguments of `export`."""

    where: RunLocation
    step: StepName = "newest"
    weights: WeightsName = PARAMS
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16. Default: the dtype of the parameters."),
    ] = None
    is_adapter: Annotated[
        bool, typer.Option("--adapter", help="Export the adapter alone, in PEFT's layout, instead of merging it.")
    ] = False
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Context length to write. Default: that of the weights the run started from, or the sequence length.",
        ),
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory or URL with another tokenizer in Hugging Face's files.")
    ] = None
    output: Annotated[
        str | None, typer.Option("-o", metavar="OUT", help="Directory or URL to create; nothing may exist there.")
    ] = None
    trust: TrustedModules = field(default_factory=list)
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload to this repository on the Hugging Face Hub.")
    ] = None
    is_public: Annotated[bool, typer.Option("--public", help="With --push: make a new repository public.")] = False
    license: Annotated[
        str | None, typer.Option(metavar="ID", help="With --push: license on the model card, such as apache-2.0.")
    ] = None
    base_model: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="With --push: base model on the model card.")
    ] = None

    def __post_init__(self) -> None:
        if self.output is None and self.push is None:
            raise InvalidError("export has no target; give -o OUT, --push OWNER/NAME, or both")
        if self.is_adapter and (self.push is not None or self.output is None):
            raise InvalidError("--adapter needs -o OUT, and excludes --push")
        if self.is_adapter and (self.context is not None or self.tokenizer is not None):
            raise InvalidError("--adapter excludes --context and --tokenizer, which belong to a whole model")
        given = {"--public": self.is_public, "--license": self.license, "--base-model": self.base_model}
        for option, value in given.items():
            if value and self.push is None:
                raise InvalidError(f"{option} has no effect without --push OWNER/NAME")


@dataclass(frozen=True, kw_only=True)
class CheckpointsArguments:
    """Arguments of `checkpoints`."""

    where: RunLocation
    is_verify: Annotated[
        bool, typer.Option("--verify", help="Compare the size and checksum of every file with the manifest.")
    ] = False
    is_deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte back and compute every fingerprint again.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class CopyArguments:
    """Arguments of `checkpoints copy`."""

    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Directory or URL of a run, or DIRECTORY/checkpoints/NAME.")
    ]
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Directory or URL of a run.")]


@dataclass(frozen=True, kw_only=True)
class VerifyResumeArguments:
    """Arguments of `verify-resume`."""

    spec: SpecPath
    steps: Annotated[int, typer.Option(metavar="N", help="Last step of both runs.")] = 30
    kills: Annotated[int, typer.Option(metavar="K", help="Number of kills.")] = 3
    processes: Annotated[int, typer.Option(metavar="P", help="Processes of the job, on this machine.")] = 1
    devices_per_process: Annotated[
        str | None,
        typer.Option(
            metavar="M[,M...]",
            help="CPU devices to simulate in each process; the starts of the killed run cycle through several numbers.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the moments of the kills.")] = 0
    overrides: Overrides = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kills < 0 or self.processes < 1 or self.steps < self.kills + 3:
            given = f"--steps {self.steps} --kills {self.kills} --processes {self.processes}"
            raise InvalidError(f"{given}: needs at least 1 process, 0 kills, and 3 steps more than kills")
        words = [] if self.devices_per_process is None else self.devices_per_process.split(",")
        if not all(word.isdecimal() and int(word) for word in words):
            raise InvalidError(
                f"--devices-per-process {self.devices_per_process!r}: needs numbers of devices, such as 4 or 8,2,1"
            )

    @property
    def device_counts(self) -> list[int] | None:
        """Numbers of CPU devices to simulate in each process, by start; None to use the devices of this machine."""
        return None if self.devices_per_process is None else [*map(int, self.devices_per_process.split(","))]


@dataclass(frozen=True, kw_only=True)
class SchemaArguments:
    """Arguments of `schema`."""

    spec: Annotated[
        str | None, typer.Argument(metavar="[SPEC]", help="Spec whose job class determines the keys of `config`.")
    ] = None
    overrides: Overrides = field(default_factory=list)
    is_batch: Annotated[
        bool,
        typer.Option("--batch", help="List the arrays of a micro-batch instead, as `forward` of the job gets them."),
    ] = False

    def __post_init__(self) -> None:
        if self.spec is None and (self.is_batch or self.overrides):
            raise InvalidError("--batch and --set need a SPEC")


@dataclass(frozen=True, kw_only=True)
class SpecArguments:
    """Arguments of `spec`."""

    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of a spec, such as gpt_nano. Without one: all names.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class InitArguments:
    """Arguments of `init`."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model's module and of the run.")]


@dataclass(frozen=True, kw_only=True)
class SpecFromArguments:
    """Arguments of `spec-from`."""

    source: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="Directory or URL of published weights, with a config.json.")
    ]
    topology: Annotated[
        str | None,
        typer.Option(metavar="ACCELERATOR", help="Hardware to size the run for, such as v5p-128. Default: this one."),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Text or tokens to train on, as in config.data.source. Default: a placeholder."
        ),
    ] = None
    is_lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter beside the frozen weights.")] = False
    ignored_config_keys: Annotated[
        list[str],
        typer.Option(
            "--ignore-config-key",
            metavar="NAME",
            help="Key to leave out of config.json, as checkpoint.init_from.ignored_config_keys does; repeatable.",
        ),
    ] = field(default_factory=list)
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Spec to write. Default: standard output.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ScaleArguments:
    """Arguments of `scale`."""

    spec: Annotated[
        str,
        typer.Argument(metavar="SPEC", help="Spec of a decoder of any size, whose learning rate and batch suit it."),
    ]
    depth: Annotated[str, typer.Option(metavar="N[,N...]", help="Layers of the model; several only with --json.")]
    tokens_per_parameter: TokensPerParameter = "20"
    width_per_layer: WidthPerLayer = 64
    head_size: HeadSize = None
    overrides: Overrides = field(default_factory=list)
    as_json: Annotated[bool, typer.Option("--json", help="Print the derived values as JSON, and write no spec.")] = (
        False
    )
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Spec to write. Default: standard output.")
    ] = None

    def __post_init__(self) -> None:
        if not self.as_json and len(self.depths) * len(self.ratios) > 1:
            raise InvalidError("scale: writes one spec; give one --depth and one ratio, or --json")
        if self.as_json and self.output is not None:
            raise InvalidError("scale: --json writes no spec; leave out --output")

    @property
    def depths(self) -> list[int]:
        """Depths, ascending."""
        return parse_depths("--depth", self.depth)

    @property
    def ratios(self) -> list[float]:
        """Ratios of tokens to parameters, ascending."""
        return parse_numbers("--tokens-per-parameter", self.tokens_per_parameter)


@dataclass(frozen=True, kw_only=True)
class MetricsArguments:
    """Arguments of `metrics`."""

    where: RunLocation
    is_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header. Default: a JSON object per line.")] = (
        False
    )
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="File to write. Default: standard output.")
    ] = None


AnyDevice = Annotated[
    bool,
    typer.Option(
        "--any-device", help="Use all devices of this machine, whatever the run had. Losses then differ by rounding."
    ),
]


CodeDirectory = Annotated[
    str | None,
    typer.Option("--code", metavar="DIR", help="Modules of this directory come first, such as the run's former code."),
]


@dataclass(frozen=True, kw_only=True)
class ExplainArguments:
    """Arguments of `explain`."""

    where: RunLocation
    step: Annotated[int | None, typer.Option(metavar="K", help="Step to explain: the one that ends with K steps.")] = (
        None
    )
    steps: Annotated[str | None, typer.Option(metavar="A-B", help="Several successive steps, instead of --step.")] = (
        None
    )
    is_spike: Annotated[
        bool, typer.Option("--spike", help="The row whose loss is furthest above those before it, instead of --step.")
    ] = False
    top: Annotated[int, typer.Option(metavar="N", help="Examples to show of each step, the most expensive first.")] = 10
    is_data_only: Annotated[
        bool, typer.Option("--data-only", help="Only what follows from the data; loads no weights and repeats no step.")
    ] = False
    as_json: AsJson = False
    overrides: Overrides = field(default_factory=list)
    code: CodeDirectory = None
    is_any_device: AnyDevice = False
    trust: TrustedModules = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.step is not None) + (self.steps is not None) + self.is_spike != 1:
            raise InvalidError("explain: needs one of --step K, --steps A-B and --spike")
        if self.top < 1:
            raise InvalidError(f"--top {self.top}: needs at least 1")
        if self.steps is not None:
            first, _, last = self.steps.partition("-")
            is_number = all(word.isdecimal() and len(word) < 16 for word in (first, last))
            if not (is_number and 0 < int(first) <= int(last)):
                raise InvalidError(f"--steps {self.steps}: needs two steps, such as 20-24")

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last step; None with --spike."""
        if self.steps is not None:
            first, _, last = self.steps.partition("-")
            return int(first), int(last)
        return None if self.step is None else (self.step, self.step)


@dataclass(frozen=True, kw_only=True)
class ReplayArguments:
    """Arguments of `replay`."""

    where: RunLocation
    step: Annotated[
        int | None, typer.Option(metavar="K", help="Step to compute again: the one that ends with K steps.")
    ] = None
    is_spot_check: Annotated[
        bool,
        typer.Option("--spot-check", help="A random checkpoint, from the one before it, instead of --step."),
    ] = False
    is_inspected: Annotated[
        bool,
        typer.Option("--inspect", help="Also show the parameters, gradients, updates and activations of the step."),
    ] = False
    save: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Safetensors file for the arrays of --inspect; must be new."),
    ] = None
    page: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="HTML page for pictures of what --inspect shows."),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN2", help="Replay RUN2 too, and name the first step, layer and leaf that differ."),
    ] = None
    against_overrides: Annotated[
        list[str],
        typer.Option("--against-set", metavar="KEY=VALUE", help="Value of a key of RUN2, as --set. Repeatable."),
    ] = field(default_factory=list)
    against_code: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Modules of this directory come first for RUN2, in a process of its own."),
    ] = None
    against_commit: Annotated[
        str | None,
        typer.Option(metavar="REV", help="The same with a commit of the repository that holds the working directory."),
    ] = None
    side: Annotated[str | None, typer.Option(hidden=True, help="For the processes of --against-code.")] = None
    as_json: AsJson = False
    overrides: Overrides = field(default_factory=list)
    code: CodeDirectory = None
    is_any_device: AnyDevice = False
    trust: TrustedModules = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.step is not None) == self.is_spot_check:
            raise InvalidError("replay: needs one of --step K and --spot-check")
        if (self.save is not None or self.page is not None) and not self.is_inspected:
            raise InvalidError("replay: --save and --page need --inspect, whose arrays and figures they write")
        if self.against is None and self.against_overrides:
            raise InvalidError("replay: --against-set needs --against RUN2")
        for name, value in (("code", self.against_code), ("commit", self.against_commit)):
            if self.against is None and value is not None:
                raise InvalidError(f"replay: --against-{name} needs --against RUN2, which may be the same run")
        if self.against_code is not None and self.against_commit is not None:
            raise InvalidError("replay: needs one of --against-code and --against-commit")
        if self.against is not None and (self.is_spot_check or self.is_inspected):
            raise InvalidError("replay: --against compares one --step K, without --inspect")


@dataclass(frozen=True, kw_only=True)
class TrialArguments:
    """Arguments of `trial`."""

    where: RunLocation
    num_steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Steps of each fork, at least 32; the second half counts.")
    ]
    directory: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Directory of both forks, by default RUN.trial; the trial goes on there.",
        ),
    ] = None
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="The change: a dotted key of the spec, repeatable."),
    ] = field(default_factory=list)
    code: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The change: modules of this directory come before those installed here."),
    ] = None
    python: Annotated[
        str | None, typer.Option(metavar="FILE", help="The change: an interpreter, such as that of another venv.")
    ] = None
    judges: Annotated[
        list[str],
        typer.Option(
            "--judge",
            metavar="METRIC=MARGIN",
            help="Metric that may not increase by more than a share, such as loss=0.1% (the default) or step-time=2%; "
            "repeatable.",
        ),
    ] = field(default_factory=list)
    step: Annotated[
        int | None, typer.Option(metavar="K", help="Checkpoint to fork, by default the newest with N steps to go.")
    ] = None
    adopted: Annotated[
        str | None,
        typer.Option("--adopt", metavar="FILE", help="If the change is kept, write the spec that goes on with it."),
    ] = None
    as_json: AsJson = False
    is_any_device: AnyDevice = False
    trust: TrustedModules = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (self.overrides or self.code or self.python):
            raise InvalidError("trial: needs a change, as --set, --code or --python")


@dataclass(frozen=True, kw_only=True)
class BundleArguments:
    """Arguments of `bundle`."""

    where: RunLocation
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="Archive to write.")]
    trust: TrustedModules = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ReproduceArguments:
    """Arguments of `reproduce`."""

    bundle: Annotated[str, typer.Argument(metavar="FILE", help="Archive that `bundle` has written.")]
    directory: Annotated[
        str, typer.Option("-o", "--output", metavar="DIR", help="Directory or URL of the new run; goes on there.")
    ]
    is_installing: Annotated[
        bool,
        typer.Option("--install", help="Install the versions of the run in a virtual environment beside FILE, use it."),
    ] = False
    as_json: AsJson = False
    overrides: Overrides = field(default_factory=list)
    is_any_device: AnyDevice = False
    trust: TrustedModules = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ProfileArguments:
    """Arguments of `profile`."""

    where: RunLocation
    steps: Annotated[int, typer.Option(metavar="N", help="Number of steps to record.")] = 5
