"""Commands that examine a spec, or write one, without running its job: plan, schema, spec-from, scale."""

import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from runner.accelerator import CHIPS, Accelerator, find_chip, parse_accelerator
from runner.checkpoint.leaves import flatten_with_names
from runner.cli.arguments import PlanArguments, ScaleArguments, SchemaArguments, SpecFromArguments
from runner.config import TrainerConfig
from runner.console import say, write_lines, write_text
from runner.data.source_files import find_corpus, find_source
from runner.errors import EXIT_DONE, InvalidError
from runner.huggingface.assets import TOKENIZER, unnest_config
from runner.huggingface.safetensors import CONFIG_FILE, drop_config_keys, read_config_json
from runner.job import RestoreableJob, make_job
from runner.plan import checks
from runner.plan.figures import format_amount
from runner.plan.prediction import SINGLE_DEVICE, build_abstract
from runner.plan.preflight import PlanRequest, check_variant, plan
from runner.plan.program import count_elements
from runner.plan.search import Candidate, Search
from runner.plan.size import derive_sizes
from runner.spec import (
    JobConfig,
    is_class_path,
    json_schema,
    load_document,
    load_job_class,
    parse_document,
    validate_spec,
)
from runner.spec.document import dump_yaml, format_overrides
from runner.storage import JsonObject, LocalStore, local_directory
from runner.trainer import BaseTrainer

# Jobs that `spec-from` tries, by name, because this package does not import models.
_JOBS = ("experiments.model.decoder:PretrainDecoder", "experiments.gpt:PretrainGPT")
# Matrices that get an adapter, by the last part of their module's name: those of attention.
_ADAPTED = ("query", "key", "value", "out", "attention_out", "query_down", "query_up", "key_value_down", "key_value_up")
_POSITIONS = ("max_position_embeddings", "n_positions")  # keys of config.json
# Sources whose names imply text: those of the Hub, and lines of JSON, except an index of token files.
_TEXT = re.compile(r"^hf://datasets/|(?<!/index)\.(jsonl|json|ndjson)(\.[a-z0-9]+)?$")
_NUM_BYTES = 256  # ids of the placeholder's tokenizer
_LENGTH_MAX, _CPU_LENGTH_MAX = 8192, 1024
_BATCH_TOKENS, _LORA_BATCH_TOKENS, _CPU_BATCH_EXAMPLES = 1 << 20, 1 << 17, 8
# Nothing is compiled here, and formulas underestimate memory.
_MEMORY_SHARE = 0.9


def print_plan(arguments: PlanArguments) -> int:
    """Print what a job would do on its hardware, which need not be present; the exit code is 2 if it would not run."""
    # `--topology` is an override like any other, applied last so that it outranks a `--set` of the same key.
    topology = [] if not arguments.topology else [f"topology.accelerator={arguments.topology}"]
    if arguments.is_variants:
        # The overrides of each run of a sweep, all of which are checked in this process.
        variants = [(*each, *topology) for each in json.load(sys.stdin)]
        write_text(json.dumps([check_variant(arguments.spec, each) for each in variants]) + "\n")
        return EXIT_DONE
    return plan(
        PlanRequest(
            arguments.spec,
            (*arguments.overrides, *topology),
            as_json=arguments.as_json,
            is_quick=arguments.is_quick,
            is_anyway=arguments.is_anyway,
            is_search=arguments.is_search,
            hours=arguments.hours,
            minutes=math.inf if arguments.minutes is None else arguments.minutes,
            is_profile=arguments.is_profile,
            trace=None if arguments.trace is None else local_directory(arguments.trace),
            against=arguments.against,
        )
    )


def print_schema(arguments: SchemaArguments) -> int:
    """Print the JSON Schema of a spec.

    With a spec, `config` has the keys of that spec's job class; without one, the keys of a trainer or any others. Only
    the top level of the spec must be valid, so `config` may be unfinished.
    """
    if arguments.is_batch:
        assert arguments.spec is not None, "checked by `SchemaArguments`"
        write_lines(_list_batch_fields(arguments.spec, arguments.overrides))
        return EXIT_DONE
    # Most specs are of trainers, so an editor without a spec gets their keys.
    config: type[JobConfig] = TrainerConfig
    if arguments.spec is not None:
        document = load_document(arguments.spec, arguments.overrides)
        validate_spec(document)
        job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
        config = job_class.Config
    write_text(json.dumps(json_schema(config, any_other=arguments.spec is None), indent=2) + "\n")
    return EXIT_DONE


def _list_batch_fields(spec_path: str, overrides: Sequence[str]) -> list[str]:
    """Return a line for each array of a micro-batch: name, dtype and shape, with B for its examples."""
    document = load_document(spec_path, overrides)
    job = make_job(document, validate_spec(document))
    if not isinstance(job, BaseTrainer):
        raise document.error("job", f"{job.spec.job} is no trainer, so it has no batches")
    fields = job.setup_builder.fields
    rows = [(name, str(each.dtype), ["B", *map(str, each.shape)]) for name, each in fields.items()]
    rows.append(("example", "int32", ["B"]))
    notes = {"example": "index of each example in the step", "padding_mask": "True for real targets"}
    width = max(len(name) for name, *_ in rows)
    lines = [f"arrays of a micro-batch of B examples, in `batch` of {type(job).__name__}.forward:"]
    for name, dtype, shape in rows:
        text = f"  {name:{width}}  {dtype:8} ({', '.join(shape)}{',' * (len(shape) == 1)})"
        lines.append(f"{text:{width + 40}}{notes.get(name, '')}".rstrip())
    return lines


def write_spec_from(arguments: SpecFromArguments) -> int:
    """Write a commented spec that starts from published weights, with what arithmetic chooses for the hardware."""
    where = arguments.output or "the spec"
    path = None if arguments.output is None else local_directory(arguments.output)
    if path is not None and (path.exists() or not path.parent.is_dir()):
        raise InvalidError(f"--output {arguments.output}: needs a new name in a directory that exists")
    for given in (arguments.source, arguments.output or "", arguments.data or "", *arguments.ignored_config_keys):
        if not given.isprintable():
            raise InvalidError(f"{given!r}: has characters that a comment cannot show; use another name")
    config = drop_config_keys(read_config_json(arguments.source), arguments.ignored_config_keys)
    data = arguments.data
    is_text = False
    if data is not None and not is_class_path(data):
        is_text = bool(_TEXT.search(data)) or (find_corpus(data) is None and not find_source(data).holds_tokens)
    # The first job that takes the model; if none does, the reason of the one that knows its family.
    job_name, problems, model = "", list[str](), JsonObject()
    for name in _JOBS:
        job_class: type[BaseTrainer] = load_job_class(parse_document(f"job: {name}", arguments.source), BaseTrainer)
        try:
            job_name, model = name, job_class.read_published_model(config) or {}
            break
        except InvalidError as error:
            problems.append(str(error))
    if not job_name:
        problem = min(problems, key=lambda each: each.startswith("model_type:"))
        raise InvalidError(f"{arguments.source}/{CONFIG_FILE}: {problem}")
    size = model.get("vocabulary_size")
    if data is None and type(size) is int and size < _NUM_BYTES:
        raise InvalidError(
            f"{arguments.source}: the model has {size} ids, too few for a placeholder of bytes; give --data SOURCE"
        )
    every_key = unnest_config(config)
    accelerator = _find_accelerator(arguments.topology)
    is_searched = accelerator is not None and accelerator.chip.speeds is not None
    positions = next((size for key in _POSITIONS if type(size := every_key.get(key)) is int and size > 0), 0)
    length = min(positions or _CPU_LENGTH_MAX, _LENGTH_MAX if is_searched else _CPU_LENGTH_MAX)
    num_devices = 1 if accelerator is None else accelerator.num_devices or 1
    tokens = _LORA_BATCH_TOKENS if arguments.is_lora else _BATCH_TOKENS
    # Every device gets the same number of examples.
    batch = num_devices * math.ceil(tokens / length / num_devices) if is_searched else num_devices * _CPU_BATCH_EXAMPLES

    end = every_key.get("eos_token_id")
    ends = end if isinstance(end, list) else [end]
    text = _SpecText(
        arguments=arguments,
        job=job_name,
        accelerator="any" if accelerator is None else str(accelerator),
        model_type=str(every_key["model_type"]),
        positions=positions,
        length=length,
        batch=batch,
        compute="bfloat16" if is_searched else "float32",
        is_text=is_text,
        separator=next((each for each in ends if type(each) is int and each >= 0), None),
    )
    job = Search(where, (), text.format()).open_job([])
    parameters = flatten_with_names(build_abstract(job.setup_builder, SINGLE_DEVICE).abstract_state.params)
    text.num_parameters = count_elements(parameters)
    modules = {name.split(".")[-2] for name in parameters if "." in name}
    text.targets = [f"*.{module}" for module in _ADAPTED if module in modules] if arguments.is_lora else []
    if accelerator is not None and accelerator.chip.speeds is not None:
        search = Search(where, (), text.format())
        hbm_bytes = accelerator.chip.device_hbm_bytes
        found = search.list_candidates(search.list_variants(), accelerator, int(hbm_bytes * _MEMORY_SHARE))
        if not found:
            raise InvalidError(
                f"{arguments.source}: by arithmetic no mesh of {accelerator} holds {text.num_parameters:,} parameters "
                f"with their training state in {format_amount(hbm_bytes, 'bytes')} a device; name more chips"
                f"{'' if arguments.is_lora else ', or give --lora'}"
            )
        text.candidate = found[0]

    content = text.format()
    findings = checks.Findings()
    checked = checks.open_job(parse_document(content, where), findings)
    if isinstance(checked, BaseTrainer):
        if not checks.check_text(checked, findings):
            checks.load_data(checked.setup_builder, findings)
        checks.check_weights(checked, build_abstract(checked.setup_builder, SINGLE_DEVICE).abstract_state, findings)
    if findings.problems:
        raise InvalidError("\n".join(findings.problems))
    if path is None:
        write_text(content)
    else:
        LocalStore(path.parent).write_chunks(path.name, [content.encode()])
        say(f"{arguments.output}: next: python -m runner plan {shlex.quote(str(arguments.output))}")
    return EXIT_DONE


def write_scaled_spec(arguments: ScaleArguments) -> int:
    """Write the spec of a decoder in another size, with a comment at each derived key, or print the sizes as JSON."""
    path = None if arguments.output is None else local_directory(arguments.output)
    if path is not None and (path.exists() or not path.parent.is_dir()):
        raise InvalidError(f"--output {arguments.output}: needs a new name in a directory that exists")
    sizes = derive_sizes(
        arguments.spec,
        arguments.overrides,
        arguments.depths,
        arguments.ratios,
        arguments.width_per_layer,
        arguments.head_size,
    )
    if arguments.as_json:
        write_text(json.dumps([asdict(size) for size in sizes], indent=1) + "\n")
        return EXIT_DONE
    (size,) = sizes
    given = load_document(arguments.spec, arguments.overrides)
    name, directory = (f"{given.data[key].rstrip('/')}_d{size.depth}" for key in ("name", "directory"))
    own = {"name": name, "directory": directory}
    document = load_document(arguments.spec, [*arguments.overrides, *format_overrides(own | dict(size.values))])
    removed = {key.rpartition(".")[2] for key, value in size.values.items() if value is None}
    document.data["config"]["train"] = {
        key: value for key, value in document.data["config"]["train"].items() if key not in removed
    }
    lines = [
        f"# {size.parameters:,} parameters, {size.embedding_parameters:,} of embeddings; {size.tokens:,} tokens.",
        f"# Written by `python -m runner scale {shlex.quote(arguments.spec)} --depth {size.depth}`.",
        "# Derived keys have a comment; all others are those of that spec.",
        f"# next: python -m runner plan {shlex.quote(arguments.output or 'SPEC')}",
    ]
    keys: list[str] = []  # of the sections around a line
    for line in dump_yaml(document.data, width=sys.maxsize).splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        keys = [*keys[:indent], line.strip().partition(":")[0]]
        rule = size.rules.get(".".join(keys))
        lines.append(line if rule is None else f"{line}  # {rule}")
    content = "\n".join(lines) + "\n"
    if path is None:
        write_text(content)
    else:
        LocalStore(path.parent).write_chunks(path.name, [content.encode()])
        say(f"{arguments.output}: next: python -m runner plan {shlex.quote(str(arguments.output))}")
    return EXIT_DONE


def _find_accelerator(text: str | None) -> Accelerator | None:
    """Return the hardware to size a run for; None for any, if this machine has no accelerator of the catalogue."""
    if text is not None:
        found = parse_accelerator(text)
        if found is not None and found.chip.speeds is not None:
            if found.num_chips is None:
                raise InvalidError(f"--topology {text}: add the number of chips, for example {text}-8")
            if found.chip.is_tpu:
                found.shape  # noqa: B018 - raises for a number of chips that is not a slice
        return found
    chip = find_chip(jax.devices()[0].device_kind)
    names = [name for name, each in CHIPS.items() if each is chip and each.speeds is not None]
    return Accelerator(names[0], jax.device_count() // CHIPS[names[0]].devices_per_chip) if names else None


@dataclass(kw_only=True)
class _SpecText:
    """Text of a spec that starts from published weights."""

    arguments: SpecFromArguments
    job: str
    accelerator: str  # hardware, as a spec names it
    model_type: str
    positions: int  # positions that the model was trained with; 0 if they are not known
    length: int
    batch: int  # examples of a step
    compute: str
    is_text: bool  # True if the data are text, which the run tokenises
    separator: int | None  # token of the model that ends a text; None if it is not known
    num_parameters: int = 0  # parameters of the model; 0 while they are not counted
    targets: Sequence[str] = ()  # patterns of the matrices with an adapter; none for no adapter
    # Mesh, micro-batch and memory policy; None for those that are chosen at the start.
    candidate: Candidate | None = None

    def format(self) -> str:
        """Return the spec as YAML with a comment at each choice."""

        def quote(value: Any) -> str:
            return dump_yaml(value, default_flow_style=True, width=sys.maxsize).splitlines()[0]

        arguments, candidate, source = self.arguments, self.candidate, self.arguments.source
        initial: JsonObject = {"path": source, "ignored_config_keys": arguments.ignored_config_keys}
        kind = "lora" if arguments.is_lora else "continued"
        title = "A LoRA adapter for" if arguments.is_lora else "Continued pretraining of"
        base = re.sub(r"[^A-Za-z0-9._-]+", "_", source.rstrip("/").rpartition("/")[2]).strip("._-") or "model"
        name = f"{base}_{kind}"[:128]
        file = shlex.quote(arguments.output or "SPEC")
        where = f"{self.positions:,} positions of the model" if self.positions else "unknown positions of the model"

        settings: JsonObject = {"topology.mesh": {"data": "auto"}, "config.train.micro_batch_examples": "auto"}
        mesh_note = "all devices hold the whole model, and share the batch"
        batch_note = memory_note = "the largest number whose compiled step fits in memory"
        if candidate is not None:
            settings = candidate.settings
            prediction = candidate.prediction
            step, needed = format_amount(prediction.times.step_seconds, "seconds"), prediction.needed_bytes
            mesh_note = (
                f"by arithmetic the fastest mesh: a step takes at least {step}, bound by {prediction.times.bound}, and "
                f"{format_amount(needed, 'bytes')} of a device"
            )
            batch_note = "of each device at a time; auto: the largest number whose compiled step fits in memory"
            memory_note = "the policy that is fastest with this mesh and fits"
        mesh = {axis: size for axis, size in settings["topology.mesh"].items() if axis == "data" or size != 1}
        memory = {
            key.removeprefix("config.memory."): value
            for key, value in settings.items()
            if key.startswith("config.memory.") and value is not None
        }

        tokenizer = {"tokenizer": {"kind": "hf", "file": f"{source.rstrip('/')}/{TOKENIZER}"}}
        separator = {} if self.separator is None else {"separator": self.separator}
        tokenise = f"tokenise: {quote(tokenizer | separator)}"
        if self.is_text:
            data = ["    # Text, which the tokenizer of the weights turns into tokens before the first step."]
            data += [f"    source: {quote(arguments.data)}", f"    {tokenise}"]
            if self.separator is not None:
                data += ["    # The separator is the weights' eos_token_id, which ends a document."]
        elif arguments.data is not None:
            data = ["    # Tokens that the tokenizer of the weights has made."]
            data += [f"    source: {quote(arguments.data)}"]
        else:
            data = [
                "    # PLACEHOLDER, to try the spec offline: bytes of Python's library, not the model's tokens.",
                "    # Name your text instead of the next two lines, and the tokenizer of the weights:",
                "    #   source: TEXT",
                f"    #   {tokenise}",
                "    source: python-stdlib",
                "    tokenizer: bytes",
            ]
        params = "bfloat16" if self.targets and self.compute == "bfloat16" else "float32"
        lines = [
            f"# {title} {self.model_type} of {self.num_parameters:,} parameters.",
            "# Written by `python -m runner spec-from`; keys that are left out have their defaults.",
            f"# command: python -m runner {file}   (the same on every host, and again after an interruption)",
            f"# plan: python -m runner plan {file}   (memory and step time as compiled)",
            f"name: {name}",
            f"job: {self.job}",
            f"directory: runs/{name}  # a disk that all hosts share, or gs://, s3:// or az://",
            "topology:",
            f"  accelerator: {self.accelerator}  # other hardware is refused, unless this is any",
            f"  # {mesh_note}.",
            f"  mesh: {quote(mesh)}",
            "checkpoint:",
            "  # The weights, once, and the model: config.model is left out, so its config.json counts"
            f"{', without the keys that are named' if arguments.ignored_config_keys else ''}.",
            f"  init_from: {quote(initial if arguments.ignored_config_keys else source)}",
            "  every_steps: 100  # what an interruption may cost",
            "  keep_last: 2",
            "logging: {every_steps: 10}",
            "config:",
            "  # model: {neftune_alpha: 5.0}   keys that stand here replace those of config.json",
            "  data:",
            *data,
            f"    sequence_length: {self.length}  # of the {where}",
            "  # A small rate, so that the weights keep what they have learned.",
            f"  optimizer: {{name: adamw, learning_rate: {'2.0e-4' if arguments.is_lora else '2.0e-5'}, b1: 0.9, "
            f"b2: 0.95, weight_decay: {'0.0' if arguments.is_lora else '0.1'}, clip_norm: 1.0}}",
            "  schedule: {name: cosine, warmup_share: 0.03, final_learning_rate: 2.0e-6}",
            "  train:",
            "    total_steps: 1000  # or total_epochs: 1",
            f"    global_batch_examples: {self.batch}  # {self.batch * self.length:,} tokens a step",
            f"    micro_batch_examples: {settings['config.train.micro_batch_examples']}  # {batch_note}",
        ]
        if memory:
            lines.append(f"  memory: {quote(memory)}  # {memory_note}")
        if self.targets:
            lines += [
                "  # Two small matrices beside each matrix of attention are trained; the weights are frozen.",
                f"  adapter: {{rank: 16, alpha: 32.0, targets: {quote(self.targets)}}}",
            ]
        lines += [
            "  eval: {every_steps: 100, batches: 8}  # on the part of the data that is held out",
            f"  precision: {{params: {params}, compute: {self.compute}}}",
        ]
        return "\n".join(lines) + "\n"
