"""Command lines of the programs `runner` and `runner-launch`, parsed by Typer.

A command is declared by a frozen dataclass. Each field is an argument or an option, in Typer's notation
(`nodes: Annotated[int | None, typer.Option(help=...)] = None`), and `__post_init__` checks rules between several of
them. `CommandLine.parse` turns words into an instance; the caller runs it. Declarations therefore import nothing but
Typer, and `--help` does not wait for jax.

A mistake is an `InvalidError` of one line that names the nearest valid choice.
"""

import dataclasses
import importlib.metadata
import inspect
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from runner.errors import InvalidError, suggest_choices, suggest_nearest

_DISTRIBUTION = "runner"
_ADDRESS = re.compile(r"[^\s/]+:([0-9]{1,5})")

# Options that give a process its place in a job.
Coordinator = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Address of process 0. Default: detected from TPU, SLURM or JobSet."),
]
NumProcesses = Annotated[int | None, typer.Option(metavar="N", help="Number of processes of the job.")]
ProcessId = Annotated[int | None, typer.Option(metavar="K", help="Number of this process, from 0.")]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Do not ask on a terminal before an attempt that runs is taken over.")
]


def validate_placement(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Raise `InvalidError` unless the options name one process of a job, or are all left out."""
    if num_processes is None or process_id is None or coordinator is None:
        if (num_processes, process_id, coordinator) != (None, None, None):
            raise InvalidError("--coordinator, --num-processes and --process-id: give all three or none")
    elif not 0 <= process_id < num_processes:
        raise InvalidError(f"--process-id {process_id} is not in 0 .. {num_processes - 1}")
    elif not (match := _ADDRESS.fullmatch(coordinator)) or not 0 < int(match[1]) < 65536:
        raise InvalidError(f"--coordinator {coordinator}: needs HOST:PORT of process 0, with a port from 1 to 65535")


def parse_numbers(option: str, text: str) -> list[float]:
    """Return the ascending positive numbers of an option, such as 2,4,8."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < each < 1e6 for each in numbers) or numbers != sorted(set(numbers)):
        raise InvalidError(f"{option} {text!r:.100}: needs positive numbers in ascending order, such as 2,4,8")
    return numbers


def parse_depths(option: str, text: str) -> list[int]:
    """Return the ascending depths of an option, such as 2,4,8."""
    if not all(word.strip().isdecimal() for word in text.split(",")):
        raise InvalidError(f"{option} {text!r:.100}: needs whole numbers of layers in ascending order, such as 2,4,8")
    return [*map(int, parse_numbers(option, text))]


# Options of a family of models by their depth.
TokensPerParameter = Annotated[
    str,
    typer.Option(metavar="R[,R...]", help="Training tokens for each parameter; 20 is compute-optimal (Chinchilla)."),
]
WidthPerLayer = Annotated[
    int, typer.Option(min=1, metavar="W", help="Width for each layer, rounded up to whole heads (64 in nanochat).")
]
HeadSize = Annotated[
    int | None, typer.Option(min=2, metavar="H", help="Width of a head, such as 64 or 128. Default: that of SPEC.")
]


class CommandLine:
    """The commands of one program.

    It is called by `python -m` and the name of `module`, or by the console script that does the same. Command lines
    that begin with a file, or with an option of the command `default`, call that command; in the list of commands its
    name reads as a placeholder. `summary` and `epilogue` are the first and last paragraph of the program's help.
    """

    def __init__(self, module: str, script: str, summary: str, epilogue: str, default: str | None = None):
        self._module, self._script, self._default = module, script, default
        self._app = typer.Typer(
            cls=_Program,
            name=script,
            help=summary,
            epilog=epilogue,
            callback=_declare_program_options,
            # Plain text without rich, whose import takes longer than parsing.
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"], "obj": self},
        )

    def add(self, name: str, arguments: type, summary: str, exit_codes: str, details: str = "") -> None:
        """Declare a command of one or two words, whose arguments and options are the fields of a frozen dataclass.

        `summary` is its line in the list of commands, at most 56 characters without a period; `exit_codes` says what
        each exit code means; `details` are further paragraphs of its own help.
        """
        hints = get_type_hints(arguments, include_extras=True)

        def make_arguments(**values: Any) -> object:
            return arguments(**values)

        # Typer reads the parameters of a command off the signature of a function.
        parameters = []
        for field in dataclasses.fields(arguments):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            kind, hint = inspect.Parameter.KEYWORD_ONLY, hints[field.name]
            parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=hint))
        make_arguments.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        make_arguments.__annotations__ = {}
        self._app.command(
            name,
            cls=_Command,
            help="\n\n".join(filter(None, (f"{summary}.", details))),
            short_help=summary,
            epilog=f"Exit codes: {exit_codes}",
        )(make_arguments)

    def parse(self, words: Sequence[str]) -> object:
        """Return the dataclass instance that a command line describes.

        Raises `InvalidError` if it is wrong, and `SystemExit` if nothing is left to do, after `--help`, `--version` and
        what shell completion asks for.
        """
        program = typer.main.get_command(self._app)
        assert isinstance(program, _Program)
        program.default = self._default
        if f"_{self._script}_COMPLETE".replace("-", "_").upper() in os.environ:  # a shell asks for completions
            program.main(prog_name=self._script)
        try:
            # Not `program.main()`, which would also decide how signals and closed pipes end the process.
            with program.make_context(self._script, list(words)) as context:
                return program.invoke(context)
        except typer.Exit as end:
            raise SystemExit(end.exit_code) from None
        except typer.TyperException as error:
            raise InvalidError(_format_mistake(error, self.format_call(self._script))) from None

    def format_call(self, path: str) -> str:
        """Return what a user types for Typer's path of a command: `python -m runner plan` for `runner plan`."""
        words = path.split()[1:]
        program = self._script if Path(sys.argv[0]).stem == self._script else f"python -m {self._module}"
        return " ".join([program, *(word for word in words if word != self._default)])


class _Command(TyperCommand):
    def format_usage(self, ctx: Any, formatter: Any) -> None:
        pieces = [re.sub(r"[{}]", "", piece).replace("......", "...") for piece in self.collect_usage_pieces(ctx)]
        formatter.write_usage(ctx.find_root().obj.format_call(ctx.command_path), " ".join(pieces))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for kind in ("argument", "option"):
            parameters = [each for each in self.get_params(ctx) if each.param_type_name == kind]
            records = filter(None, (each.get_help_record(ctx) for each in parameters))
            rows = [(name.partition(" <")[0] if kind == "argument" else name, text) for name, text in records]
            if rows:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [*args]
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            call = ctx.find_root().obj.format_call(ctx.command_path)
            option = str(getattr(error, "option_name", ""))
            # A dotted option is a key of the spec.
            if "." in option and any("--set" in each.opts for each in self.get_params(ctx)):
                place = next(n for n, word in enumerate(words) if word.partition("=")[0] == option)
                value = words[place].partition("=")[2] or "".join(words[place + 1 : place + 2]) or "VALUE"
                override = shlex.quote(f"{option.removeprefix('--')}={value}")
                raise InvalidError(f"{call}: {option} is not an option; did you mean --set {override}?") from None
            raise InvalidError(_format_mistake(error, call)) from None


class _Program(TyperGroup):
    """The commands of a program, one of which may be the default."""

    default: str | None = None

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.obj.format_call(ctx.command_path), " ".join(self.collect_usage_pieces(ctx)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if self.default is not None and args and args[0].startswith("-") and args[0] not in own:
            args = [self.default, *args]
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            raise InvalidError(_format_mistake(error, ctx.obj.format_call(ctx.command_path))) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        for num_words in (2, 1):
            name = " ".join(args[:num_words])
            if name in self.commands:
                return name, self.commands[name], args[num_words:]
        word = args[0]
        # A path that does not exist is left to the reader of the spec, which suggests files.
        is_path = "/" in word or word.endswith((".yaml", ".yml")) or Path(word).is_file()
        if self.default is not None and (ctx.resilient_parsing or is_path):
            return self.default, self.commands[self.default], args
        if ctx.resilient_parsing:
            return None, None, args[1:]
        kind = "no command" if self.default is None else "neither a command nor a file"
        choices = [name for name in self.commands if name != self.default]
        raise InvalidError(
            f"{ctx.obj.format_call(ctx.command_path)}: {word!r} is {kind}{suggest_choices(word, choices)}"
        )

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return [item for item in super().shell_complete(ctx, incomplete) if item.value != self.default]


def _format_mistake(error: typer.TyperException, call: str) -> str:
    """Return one line that says what Typer found wrong with the command line of the program or command `call`."""
    option, parameter = getattr(error, "option_name", None), getattr(error, "param", None)
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    if message.startswith("no such option"):
        possibilities = getattr(error, "possibilities", None) or []
        if nearest := suggest_nearest(str(option), possibilities):
            return f"{call}: {option} is not an option{nearest}"
        message = f"{option} is not an option"
    elif message.startswith("invalid value") and parameter is not None:
        # Pydantic, which converts the values, puts these words before the messages of its callers.
        name = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.metavar
        reason = getattr(error, "message", message).removeprefix("Value error, ").rstrip(".")
        message = f"{name}: {reason[:1].lower()}{reason[1:]}"
    return f"{call}: {message}; see {call} --help"


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"{_DISTRIBUTION} {importlib.metadata.version(_DISTRIBUTION)}")
        raise typer.Exit


def _declare_program_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
