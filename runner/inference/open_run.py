"""Read-only access to a run by its directory: its job (which is not run), its weights, and text from them.

The job is made from the run's `spec.yaml`, which was resolved when the run began. The caller needs no spec, and later
edits of the user's spec have no effect.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from runner.checkpoint.inspect import find_checkpoint, make_step_error, open_checkpoint, read_document
from runner.checkpoint.manifest import CHECKPOINTS, MAX_LISTINGS, read_committed
from runner.console import warn
from runner.data.chat import Renderer
from runner.data.tokenizers import BatchTokenizer, HuggingFaceTokenizer, Tokenizer
from runner.distributed.agreement import Hosts
from runner.errors import DataError, InvalidError, ResumeError, StorageError
from runner.evaluation.generation import (
    Sampler,
    TextCodec,
    encode_prompt,
    find_start_token,
    generate,
    infer_vocabulary_size,
    load_data_codec,
    make_decoder,
    make_variables,
    parse_ids,
    stream_output,
)
from runner.huggingface.assets import TOKENIZER, ExportAssets, find_assets, read_assets
from runner.job import RestoreableJob, prepare_process
from runner.parallel.mesh import AXES, make_mesh, read_device_memory_bytes
from runner.spec import PARAMS, Trust, load_job_class, validate_spec
from runner.storage import Store, open_store, parse_number
from runner.train.evaluators import cast_like
from runner.trainer import BaseTrainer

NEWEST, BEST = "newest", "best"


@dataclass(frozen=True)
class ReadOnlyRun:
    """Run that is only inspected: its directory or URL, and its job, which is not set up."""

    directory: str
    store: Store
    job: BaseTrainer

    def prepare_process(self) -> None:
        """Configure this process, before JAX starts, to compile the run's programs and leave GPU memory to the run."""
        # JAX would otherwise reserve most of the GPU memory, which a run on the same host needs.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        prepare_process(self.job)

    def list_steps(self) -> list[int]:
        """Return all committed steps, ascending. Raises `InvalidError` if there is none yet."""
        found = list(read_committed(self.store))
        if not found:
            raise InvalidError(f"{self.store.url}: no checkpoint is committed yet; run the job, or wait for its first")
        return found

    def get_checkpoint(self, step: int) -> str:
        """Return the path or URL of the checkpoint of a step, for `load_weights`."""
        return f"{self.store.url}/{CHECKPOINTS}/{step}"

    def has_checkpoint(self, checkpoint: str) -> bool:
        """Return False if the run has deleted the checkpoint."""
        return parse_step(checkpoint) in read_committed(self.store)

    def find_checkpoint(self, step: str) -> str:
        """Return the checkpoint that `newest`, `best` or a number names. Called on one host. Raises InvalidError."""
        steps = self.list_steps()
        if step in (NEWEST, BEST):
            return find_checkpoint(self.directory, step)[0]
        if parse_number(step) not in steps:
            raise make_step_error(self.store, step, steps)
        return self.get_checkpoint(int(step))

    def at_step(self, step: int) -> "ReadOnlyRun":
        """Return the run with the config that has made `step`, which stages of the config may change."""
        return dataclasses.replace(self, job=self.job.at_step(step))

    def load_found_weights(
        self, step: str, abstract: Any, weights: str, hosts: Hosts, found: str | None = None
    ) -> tuple[str, Any]:
        """Return the checkpoint that `newest`, `best` or a number names, and its weights. Called on every host.

        A run may delete old checkpoints while this process compiles or reads. `newest` and `best` are then resolved
        again.

        The arguments are those of `find_checkpoint` and `load_weights`, whose errors it raises; `found` is the
        checkpoint to try first. Raises StorageError if the run deletes its checkpoints faster than they can be read.
        """
        for _ in range(MAX_LISTINGS):
            # Every host has the same `found`.
            checkpoint: str = found or hosts.run_on_main(lambda: self.find_checkpoint(step))
            loaded, problem = self.load_unless_deleted(checkpoint, abstract, weights, hosts)
            if problem is None:
                return checkpoint, loaded
            if step not in (NEWEST, BEST):
                raise problem
            found = None
        raise StorageError(f"{self.store.url}: {MAX_LISTINGS} times a checkpoint was deleted while it was read")

    def load_unless_deleted(
        self, checkpoint: str, abstract: Any, weights: str, hosts: Hosts
    ) -> tuple[Any, InvalidError | None]:
        """Return the weights of a checkpoint, or the error on every host if the run has deleted it meanwhile.

        Called on every host, with the arguments of `load_weights`, which raises any other error.
        """
        problem, loaded = None, None
        try:
            loaded = self.load_weights(checkpoint, abstract, weights)
        except InvalidError as error:
            problem = error
        # All hosts learn whether one of them has failed, so that none waits alone in the program.
        if not any(hosts.gather(problem is not None)):
            return loaded, None
        problem = problem or InvalidError(f"{checkpoint}: another process could not read it")
        if hosts.run_on_main(functools.partial(self.has_checkpoint, checkpoint)):
            raise problem
        return None, problem

    def load_weights(self, checkpoint: str, abstract: Any, weights: str = PARAMS) -> Any:
        """Load the weights of a checkpoint with the shapes, dtypes and shardings of `abstract`. Called on every host.

        `checkpoint` is a path or URL from `find_checkpoint` or `get_checkpoint`. `weights` is `params`, or an average
        such as `ema_0.999`, which is cast to the types of the parameters. Raises InvalidError if the checkpoint is
        damaged, is of another model, or has no such weights.
        """
        try:
            if weights == PARAMS:
                return open_checkpoint(checkpoint, like=abstract)[0]
            # Averages are stored in float32, whatever the type of the parameters.
            params_in_float32 = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), abstract[PARAMS]
            )
            found = open_checkpoint(checkpoint, like=abstract | {PARAMS: params_in_float32}, weights=weights)[0]
            return found | {PARAMS: cast_like(found[PARAMS], abstract[PARAMS])}
        except ResumeError as error:
            # An error on the command line is one line.
            one_line = "; ".join(line.strip() for line in str(error).splitlines())
            raise InvalidError(f"{self.store.url}: {one_line}") from error


def parse_step(checkpoint: str) -> int:
    """Return the step of a checkpoint from its path or URL."""
    return int(checkpoint.rpartition("/")[2])


def open_run(directory: str, trust: Sequence[str] = ()) -> ReadOnlyRun:
    """Open the run in a directory or at a URL. Reads `spec.yaml` and claims no attempt.

    `trust` lists modules, with their submodules, whose classes the run may name besides those of this project. Raises
    InvalidError if no run has begun there, its job is not a trainer, or its spec names a class of another module.
    """
    store = open_store(directory)
    document = read_document(store, Trust(tuple(trust)))
    spec = validate_spec(document)
    job_class = load_job_class(document, RestoreableJob)
    # Other jobs have a state, but no model that could be applied to tokens.
    if not issubclass(job_class, BaseTrainer):
        raise InvalidError(f"{store.url}: its job {spec.job} trains no model of tokens; needs a run of a BaseTrainer")
    # Checkpoints are opened with the adapter merged into the weights, so the model must have none.
    config = {name: value for name, value in spec.config.items() if name != "adapter"}
    document = dataclasses.replace(document, data={**document.data, "config": config})
    spec = spec.model_copy(update={"directory": directory, "config": config})
    # Compiled programs in the directory are code, which only a run of the user's own spec loads.
    if spec.topology is not None:
        spec = spec.model_copy(update={"topology": spec.topology.model_copy(update={"compile_cache": "host"})})
    return ReadOnlyRun(directory, store, job_class(spec, document))


def _place_weights(job: BaseTrainer) -> tuple[Mesh, Any]:
    """Return a mesh of devices of this process, and the weights without values, with their shardings on it.

    One device holds them, unless they would fill half of its memory: then all devices do.
    """
    for devices in (jax.local_devices()[:1], jax.local_devices()):
        mesh = make_mesh(dict.fromkeys(AXES, 1) | {"fsdp": len(devices)}, devices)
        abstract = job.weights(job.setup_builder.build_on_mesh(mesh, jax.random.key(job.spec.seed)).abstract_state)
        if sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)) < read_device_memory_bytes() / 2:
            break
    return mesh, abstract


class LoadedModel(NamedTuple):
    """Model of a run with the weights of one step.

    Attributes:
        model: the module, with the config that has made the step.
        variables: its variables on the devices of this process, for `model.apply`.
        tokenizer: tokenizer of the data, with `encode` and `decode`; None if it is not known, or the data are no text.
        step: the step.
    """

    model: nn.Module
    variables: Any
    tokenizer: Tokenizer | BatchTokenizer | None
    step: int


def load_model(run: ReadOnlyRun, step: str = NEWEST, weights: str = PARAMS) -> LoadedModel:
    """Load the model of a run with its weights. Raises as `ReadOnlyRun.load_found_weights`."""
    checkpoint = run.find_checkpoint(step)
    job = run.at_step(parse_step(checkpoint)).job
    _, abstract = _place_weights(job)
    checkpoint, loaded = run.load_found_weights(step, abstract, weights, Hosts.single_process(), checkpoint)
    tokenizer: Tokenizer | BatchTokenizer | None = None
    if job.config.data.has_tokens:
        with contextlib.suppress(DataError):
            tokenizer = load_data_codec(job.config.data).tokenizer
    return LoadedModel(job.model(), make_variables(loaded), tokenizer, parse_step(checkpoint))


@dataclass(frozen=True)
class SampleRequest:
    """Request for `num_tokens` tokens after `prompt`."""

    prompt: str = ""
    step: str = NEWEST  # number of a step, `newest` or `best`
    num_tokens: int = 200
    sampling: Sampler = field(default_factory=Sampler)  # temperature, top-p and seed
    weights: str = PARAMS  # `params`, or an average such as `ema_0.999`
    is_chat: bool = False  # `prompt` is the message of a user, which the model answers by the chat template of the run

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvalidError(f"--tokens {self.num_tokens}: needs at least 1")
        if self.is_chat and not self.prompt:
            raise InvalidError("--chat: needs --prompt TEXT, the message of the user")


def _render_chat_prompt(run: ReadOnlyRun, assets: ExportAssets, message: str) -> str:
    """Return the rendered prompt after which the model answers a message of the user."""
    try:
        template = assets.read_template()
    except DataError as error:
        raise InvalidError(
            f"{run.store.url}: has no chat template: {error}; --chat needs data that were made with "
            "config.chat.template, or published weights that have one"
        ) from error
    try:
        with Renderer(template) as renderer:
            return renderer.render_prompt([{"role": "user", "content": message}])
    except DataError as error:
        raise InvalidError(f"{run.store.url}: --chat: {error}") from error


def sample(run: ReadOnlyRun, request: SampleRequest) -> Iterator[str]:
    """Return an iterator over the prompt and the text of each token; ids between spaces if no tokenizer is known.

    With `is_chat` it yields only the answer, which ends before the token that ends the turn. Raises InvalidError,
    before the first piece, if the request does not fit the run.
    """
    # The checkpoint is found before the model is built, so that a wrong step is reported at once.
    checkpoint = run.find_checkpoint(request.step)
    run = run.at_step(parse_step(checkpoint))
    job = run.job
    data, length = job.config.data, job.config.data.units_per_example
    if not data.has_tokens:
        raise InvalidError(
            f"{run.store.url}: its job {job.spec.job} trains no language model, as its data are arrays; evaluate shows "
            "its metrics"
        )
    text, shown, ends, no_text = request.prompt, request.prompt, [], ""
    assets: ExportAssets | None = None
    if request.is_chat:
        # The tokenizer, the chat template and the end tokens are those of an export.
        assets = read_assets(run.store) or find_assets(data, job.spec.checkpoint.initial_weights)
        text, shown = _render_chat_prompt(run, assets, request.prompt), ""
        found = assets.list_ids().get("eos_token_id", [])
        ends = found if isinstance(found, list) else [found]
    try:
        codec: TextCodec | None = load_data_codec(data)
    except DataError as error:
        codec = None
        # Data that are ids alone were made with the tokenizer of the published weights.
        if assets is not None and TOKENIZER in assets.tokenizer.files:
            codec = TextCodec(HuggingFaceTokenizer(assets.tokenizer.files[TOKENIZER]), None, {"kind": "hf"})
        elif assets is not None:
            raise InvalidError(f"{run.store.url}: --chat: {error}") from error
        else:
            no_text = str(error)

    mesh, abstract = _place_weights(job)
    model = job.model()
    # Inferred from the model, because a custom one may ignore the vocabulary of the data.
    try:
        num_ids = infer_vocabulary_size(model, make_variables(abstract), length)
    except InvalidError as error:
        raise InvalidError(
            f"{run.store.url}: its job {job.spec.job} trains no language model: {error}; evaluate shows its metrics"
        ) from error
    if no_text:
        warn(f"ids instead of text: {no_text}")
    if codec is not None and codec.tokenizer.vocabulary_size > num_ids:
        size = codec.tokenizer.vocabulary_size
        raise InvalidError(
            f"{run.store.url}: its tokenizer has {size:,} ids, its model {num_ids:,}: not the same run's"
        )
    if codec is None:
        prompt = parse_ids(text, num_ids) or [0]
    else:
        num_ids = codec.tokenizer.vocabulary_size  # ids of the model beyond the tokenizer have no text
        prompt = encode_prompt(codec, text) or [find_start_token(codec, data)]
    # Building the model takes time, during which the run may have deleted the checkpoint.
    hosts = Hosts.single_process()
    checkpoint, weights = run.load_found_weights(request.step, abstract, request.weights, hosts, checkpoint)
    variables = make_variables(weights)
    warn(f"{job.spec.name}: step {parse_step(checkpoint)}{'' if request.weights == PARAMS else f', {request.weights}'}")
    decoder = make_decoder(model, variables, length, job.config.precision.compute, mesh)
    tokens = generate(decoder, request.sampling.make_chooser(num_ids), prompt, request.num_tokens, length)
    return stream_output(itertools.takewhile(lambda token: token not in ends, tokens), prompt, shown, codec)
