"""BaseTrainer: a RestoreableJob that trains a flax model on tokens. Composes state, step, data and metrics.

An experiment says which model (`model`), and may replace the loss (`forward`), the optimizer, the schedule or the
evaluation. Everything is called on every host.
"""

import contextlib
import importlib
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh

from runner.accelerator import chip_of, parse_accelerator
from runner.checkpoint.manifest import newest_manifest
from runner.config import ModelConfig, TrainerConfig
from runner.data import Dataset, Prefetcher, check_vocabulary, global_batch, is_available, load_dataset
from runner.errors import DataError, InvalidError
from runner.job import RestoreableJob
from runner.periodic import is_due, tokens_at
from runner.spec import Document, ExecutionSpec
from runner.storage import encode_line
from runner.train import state as train_state
from runner.train import step as pure
from runner.train.compilation import Layout, compile_to_fit, lower_train_step, lower_val_step, program_digest
from runner.train.flops import Flops, Sizing, counted_flops
from runner.train.loss import cross_entropy_sum
from runner.train.mesh import (
    batch_sharding,
    device_memory_bytes,
    does_mesh_fit,
    make_mesh,
    mesh_sizes,
    micro_batch_sizes,
    num_batch_shards,
)
from runner.train.metrics.file import NAME as METRICS
from runner.train.metrics.file import open_metrics
from runner.train.metrics.row import Row
from runner.train.metrics.sinks import Sink, make_progress
from runner.train.metrics.window import Window
from runner.train.optimizer import clip, make_optimizer, make_schedule

MEMORY_SHARE = 0.9  # of a device's memory, the part that a step may be planned to use


class BaseTrainer(RestoreableJob):
    """Base of every training job."""

    Config: ClassVar[type[TrainerConfig[Any]]] = TrainerConfig[ModelConfig]
    needs_topology: ClassVar[bool] = True

    sharded_init = staticmethod(train_state.sharded_init)

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        assert spec.topology is not None, "a trainer needs a spec with a topology"
        super().__init__(spec, document)
        self.topology = spec.topology
        self.window = Window()
        self._compiled_val: Any = None

    # What an experiment says.

    def model(self) -> nn.Module:
        """The flax module; called as `module(x_BxT, deterministic=...)`, it returns logits (B, T, V)."""
        raise NotImplementedError

    @classmethod
    def forward(
        cls, apply_fn: Any, params: Any, batch: pure.Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss summed over the real target tokens of a micro-batch, and meta. No key: deterministic.

        `batch` holds `x`, `y` and `padding_mask` (B, T), and `example` (B): the place of each example in the step. What
        is random should depend on that and on the step's `key`; this default draws by micro-batch.
        """
        rngs = None if key is None else {"dropout": jax.random.fold_in(key, batch["example"][0])}
        logits_BxTxV = apply_fn({"params": params}, batch["x"], deterministic=key is None, rngs=rngs)
        loss_sum, _ = cross_entropy_sum(logits_BxTxV, batch["y"], batch["padding_mask"])
        return loss_sum, {}

    @classmethod
    def optimizer(cls) -> str | optax.GradientTransformation | None:
        """A library name, an optax transformation, or None for the one that the spec names."""
        return None

    @classmethod
    def schedule(cls) -> str | optax.Schedule | None:
        """A library name, an optax schedule, or None for the one that the spec names (a constant if it names none)."""
        return None

    def flops_per_token(self) -> Flops:
        """FLOPs of a train step for one token, counted in the traced `forward`; replace it where there is a formula.

        Needs the shapes of the state. Raises `ValueError` if `forward` calls kernels that cannot be counted.
        """
        abstract, length = self.abstract_state(), self.config.data.sequence_length
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract.params)
        dtypes = {"x": jnp.int32, "y": jnp.int32, "padding_mask": jnp.bool_}
        batch = {field: jax.ShapeDtypeStruct((1, length), dtype) for field, dtype in dtypes.items()}
        batch["example"] = jax.ShapeDtypeStruct((1,), jnp.int32)

        def loss(params: Any, batch: pure.Batch) -> jax.Array:
            return self.forward(abstract.apply_fn, params, batch, None)[0]

        return counted_flops(loss, params, batch, num_tokens=length, platform="cpu")

    def sizing(self, tensor: int) -> Sizing:
        """What a token keeps and sends where single matrices lie on `tensor` devices; by default nothing is known."""
        return Sizing()

    def search_space(self) -> dict[str, tuple[Any, ...]]:
        """What `plan --search` may vary besides mesh and micro-batch: values by dotted key. Nothing by default."""
        return {}

    def evaluator(self) -> float | None:
        """Validation loss, the mean over the real target tokens of `eval.batches` batches; None if asked to stop."""
        loss_sum, token_count = jnp.float32(0), jnp.float32(0)
        for index in range(self._num_eval_batches()):
            if self.notice.poll():
                return None
            # At most one batch ahead of the device: a stop must not wait for a whole evaluation that is queued.
            jax.block_until_ready(loss_sum)
            loss, count, _ = self.compiled_val(self.state, self.batch("validation", index))
            loss_sum, token_count = loss_sum + loss, token_count + count
        return float(loss_sum) / max(float(token_count), 1.0)

    # The contract's surface.

    @classmethod
    def train_step(
        cls, state: TrainState, batch: pure.Batch, key: jax.Array, accumulate_steps: int
    ) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
        """One optimizer step over (S, B, T): (state, loss, meta). Pure."""
        return pure.train_step(cls.forward, state, batch, key, accumulate_steps)

    @classmethod
    def val_step(cls, state: TrainState, batch: pure.Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(loss_sum, token_count, last_meta) over (S, B, T). Pure."""
        return pure.val_step(cls.forward, state, batch)

    def batch(self, slice: Literal["train", "validation"] = "train", step: int | None = None) -> pure.Batch:
        """The global (S, B, T) batch after `step` completed steps, by default this job's: `x`, `y`, `padding_mask`."""
        return global_batch(
            self.dataset,
            slice,
            self.step if step is None else step,
            accumulate_steps=self.layout.accumulate_steps,
            micro_batch=self.layout.micro_batch,
            sharding=batch_sharding(self.mesh),
        )

    @property
    def total_steps(self) -> int:
        """The step at which training is done."""
        return int(self.config.total_steps)

    def run(self) -> None:
        """Train to the end: exactly `total_steps` steps in all, over any number of attempts."""
        with self.reporting(), Prefetcher(lambda step: self.batch("train", step), first_step=self.step) as batches:
            while self.step < self.total_steps:
                self.state, loss, meta = self.compiled_train(self.state, next(batches), self.key)
                self.step += 1
                self.window.add(self.step, loss, meta)
                if self.is_log_due() or self.is_eval_due():
                    self.report()
                self.save_or_stop()

    # Set-up: what can be known before a device is touched, then mesh, data, shapes.

    def setup(self) -> None:
        """Check the devices, the mesh, the batch and the data against the spec."""
        self._check_accelerator()
        self.lay_out(jax.devices())
        self.dataset: Dataset = self.load_data()
        self.vocabulary_size = self.check_vocabulary()
        self.shape_state()

    def lay_out(self, devices: Sequence[jax.Device]) -> None:
        """Lay the mesh over these devices, and the batch over the mesh."""
        try:
            self.mesh: Mesh = make_mesh(mesh_sizes(self.topology.mesh, len(devices)), devices)
        except InvalidError as error:
            raise self.document.error("topology.mesh", str(error)) from error
        self.key = jax.random.key(self.spec.seed)
        self.micro_batch_sizes()

    def begin(self) -> None:
        """Claim the next attempt, and open its metrics."""
        super().begin()
        self.metrics = open_metrics(self.store, self.background, self.fence)

    def _check_accelerator(self) -> None:
        try:
            wanted = parse_accelerator(self.topology.accelerator)
        except InvalidError as error:
            raise self.document.error("topology.accelerator", str(error)) from error
        device, number = jax.devices()[0], jax.device_count()
        if wanted is not None and not wanted.matches(device.device_kind, number):
            options = " ".join(f"--set {option}" for option in self.options_for_here(number))
            raise self.document.error(
                "topology.accelerator",
                f"sized for {self.topology.accelerator}, here: {number} x {device.device_kind}; "
                f"to run it here: {options}",
            )

    def options_for_here(self, num_devices: int) -> list[str]:
        """The `--set` options that make a job sized for other hardware run on the devices at hand, if slowly."""
        config = self.config
        length = min(config.data.sequence_length, 128)
        total = "total_steps=100" if config.train.total_steps else f"total_tokens={100 * num_devices * length}"
        options = {
            "topology.accelerator=any": True,
            "topology.mesh={data: auto, fsdp: 1, tensor: 1}": not does_mesh_fit(self.topology.mesh, num_devices),
            f"directory={self.spec.directory}_here": True,
            "checkpoint.every_steps=10": True,
            f"config.train.global_batch_examples={num_devices}": True,
            f"config.train.{total}": True,
            f"config.data.sequence_length={length}": length != config.data.sequence_length,
            "config.memory.loss_chunk_positions=null": length % (config.memory.loss_chunk_positions or 1) != 0,
            "config.data.source=python-stdlib": not is_available(config.data.source),
            "config.schedule.warmup_steps=10": config.schedule.warmup_steps > 10,
            "config.eval.every_steps=50": config.eval.every_steps is not None,
            "config.precision.compute=float32": jax.default_backend() == "cpu",
        }
        return [shlex.quote(option) for option, is_needed in options.items() if is_needed]

    def micro_batch_sizes(self) -> list[int]:
        """Every micro-batch per device that divides its share of the global batch, largest first."""
        train = self.config.train
        try:
            return micro_batch_sizes(
                train.global_batch_examples, train.micro_batch_examples, num_batch_shards(self.mesh)
            )
        except InvalidError as error:
            raise self.document.error("config.train", str(error)) from error

    def load_data(self) -> Dataset:
        """The tokens that the spec names, the same on every host."""
        try:
            dataset = load_dataset(self.config.data, seed=self.spec.seed)
        except DataError as error:
            raise self.document.error("config.data.source", str(error)) from error
        fingerprints = self.hosts.gather(dataset.fingerprint)
        different = [process for process, other in enumerate(fingerprints) if other != fingerprints[0]]
        if different:
            raise DataError(f"{self.config.data.source}: processes {different} read other data than process 0")
        return dataset

    def check_vocabulary(self) -> int:
        """The size of the vocabulary, which must hold every token of the data."""
        given = getattr(self.config.model, "vocabulary_size", "auto")
        size = self.dataset.vocabulary_size if given == "auto" else int(given)
        check_vocabulary(self.dataset, size)
        return size

    def shape_state(self) -> None:
        """Abstract state, shardings, optimizer and schedule. Allocates nothing."""
        model = self.model()

        def init_params(key: jax.Array) -> Any:
            tokens_BxT = jnp.zeros((1, self.config.data.sequence_length), jnp.int32)
            return model.init(key, tokens_BxT, deterministic=True)["params"]

        def make_state(params: Any) -> TrainState:
            return train_state.state_of(model, params, optimizer)

        boxed = jax.eval_shape(init_params, self.key)
        self._schedule = self._make_schedule()
        optimizer = self._make_optimizer(train_state.matrices(boxed))
        shardings = train_state.variable_shardings(boxed, self.mesh)
        self._make_state = lambda key: make_state(nn.unbox(init_params(key)))
        self._abstract_state = train_state.abstract_state(make_state, nn.unbox(boxed), shardings, self.mesh)

    def _make_schedule(self) -> optax.Schedule:
        schedule, config = self.schedule(), self.config
        if callable(schedule):
            return schedule
        return make_schedule(
            schedule or config.schedule.name, config.schedule, config.optimizer.learning_rate, self.total_steps
        )

    def _make_optimizer(self, is_matrix: Any) -> Any:
        optimizer, config = self.optimizer(), self.config.optimizer
        if optimizer is None or isinstance(optimizer, str):
            optimizer = make_optimizer(optimizer or config.name, config, self._schedule, is_matrix)
        return clip(optimizer, config.clip_norm)

    def abstract_state(self) -> TrainState:
        """Shape, dtype and sharding of every leaf."""
        return self._abstract_state

    def init_state(self) -> TrainState:
        """The state at step 0, born sharded."""
        return train_state.init_state(self._make_state, self.key, self._abstract_state, self.mesh)

    def weights(self, state: TrainState) -> Any:
        """The parameters."""
        return {"params": state.params}

    def with_weights(self, state: TrainState, weights: Any) -> TrainState:
        """`state` with these parameters."""
        return state.replace(params=weights["params"])

    # Compilation: once an attempt, before the first step.

    def prepare(self) -> None:
        """Choose the micro-batch by the compiled train step's own memory figures."""
        self.compile_train(self.hosts.agree(int(device_memory_bytes() * MEMORY_SHARE)))
        if self.hosts.is_main:
            examples = self.layout.micro_batch_examples
            self.ledger.append("compile", None, program=self.program, micro_batch_examples=examples)
        self._mfu_of_a_token_per_second = self._find_mfu_of_a_token_per_second()

    def _find_mfu_of_a_token_per_second(self) -> float:
        """What each token a second adds to MFU, the model's FLOPs over the devices' peak; 0 if that is not known."""
        chip = chip_of(self.mesh.devices.flat[0].device_kind)
        if chip is None or chip.speeds is None:
            return 0.0
        num_chips = self.mesh.size / chip.devices_per_chip
        try:
            return self.flops_per_token().per_token / (num_chips * chip.speeds.flops_per_second)
        except ValueError:  # a kernel that does not say what it computes
            return 0.0

    def compile_train(self, limit_bytes: int) -> None:
        """Compile `train_step` with the largest micro-batch that fits into `limit_bytes` of each device."""
        sizes = self.micro_batch_sizes()
        known = self._known_micro_batch() if len(sizes) > 1 else None
        try:
            self.compiled_train = compile_to_fit(
                self.compile_micro_batch, [known] if known in sizes else sizes, limit_bytes
            )
        except InvalidError as error:
            raise self.document.error("topology", str(error)) from error

    def compile_val(self) -> Any:
        """Compile `val_step`."""
        return lower_val_step(self.val_step, self._abstract_state, self.layout).compile()

    @property
    def compiled_val(self) -> Any:
        """The compiled `val_step`. It is compiled beside the steps after the first row; the first use waits for it."""
        self._begin_to_compile_val()
        return self._compiled_val.result()

    def _begin_to_compile_val(self) -> None:
        """In the background, and not before a first row is out: tracing would slow down what the first steps need."""
        if self._compiled_val is None:
            compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
            self._compiled_val = compiler.submit(self.compile_val)
            compiler.shutdown(wait=False)

    def _known_micro_batch(self) -> int | None:
        """The size that an earlier attempt chose on the same hardware: another one would move the bits by rounding."""
        manifest = newest_manifest(self.store) if self.hosts.is_main else None
        record = self.hosts.agree(manifest and manifest.get("topology"))
        if not record or {key: record.get(key) for key in self._hardware()} != self._hardware():
            return None
        return int(record["micro_batch_examples"])

    def _hardware(self) -> dict[str, Any]:
        return {
            "mesh": {axis: int(size) for axis, size in self.mesh.shape.items()},
            "device_kind": self.mesh.devices.flat[0].device_kind,
            "processes": self.hosts.num_processes,
        }

    def compile_micro_batch(self, micro_batch_examples: int) -> Any:
        """Compile `train_step` for so many examples on a device at once, and make that the layout."""
        config = self.config
        self.layout = Layout(
            self.mesh, config.train.global_batch_examples, micro_batch_examples, config.data.sequence_length
        )
        lowered = lower_train_step(self.train_step, self._schedule, self._abstract_state, self.key, self.layout)
        self.program = program_digest(lowered)
        return lowered.compile()

    # Metrics.

    def is_log_due(self) -> bool:
        """Whether this step has a row of its own."""
        return is_due(self.step, self.spec.logging.every_steps, self.total_steps)

    def is_eval_due(self) -> bool:
        """Whether this step is evaluated."""
        if self.dataset.num_validation_windows == 0:
            return False
        return is_due(self.step, self.config.eval.every_steps, self.total_steps)

    def _num_eval_batches(self) -> int:
        """`eval.batches`, or fewer if they hold the whole validation split."""
        windows = self.dataset.num_validation_windows
        return min(self.config.eval.batches, -(-windows // self.config.train.global_batch_examples))

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Inside, `report` may be called; however it is left, the sinks are closed."""
        self._sinks = self._open_sinks() if self.hosts.is_main else []
        try:
            self._resume_metrics()
            yield
        finally:
            for sink in self._sinks:
                sink.close()

    def _resume_metrics(self) -> None:
        """Drop the rows beyond the restored step, and evaluate where a stop came before the evaluation."""
        kept = self.checkpoints.restorer.companions.get(METRICS)
        row = self.metrics.rewind(self.step, kept) if self.hosts.is_main else None
        self.window = Window(self.step)
        row = self.hosts.agree(row)
        if row is not None and self.is_eval_due() and "val/loss" not in row:
            row |= self._evaluate()
            if "val/loss" not in row:
                self.save_or_stop()
            elif self.hosts.is_main:
                self.metrics.replace_last(row)
                self._show(row)

    def _open_sinks(self) -> list[Sink]:
        sinks: list[Sink] = [make_progress(self.spec.name, self.total_steps, self.step, self.config.tokens_per_step)]
        if self.spec.logging.wandb != "disabled":
            tracking = importlib.import_module("runner.train.metrics.tracking")
            sinks.append(tracking.Tracking(self.spec, self.id, self.store.root))
        return sinks

    def report(self) -> None:
        """Wait for the device, write the row of this step, evaluate if it is time."""
        row = self.window.close(self.config.tokens_per_step)
        if self._mfu_of_a_token_per_second:
            row["perf/mfu"] = row["perf/tokens_per_second"] * self._mfu_of_a_token_per_second
        if self.is_eval_due():
            row |= self._evaluate()
        if self.hosts.is_main:
            self.fence.glance()
            self.metrics.append(row)
            self._show(row)
        self._begin_to_compile_val()

    def _evaluate(self) -> Row:
        with self.progress.during("evaluation"):
            loss = self.evaluator()
        self.window.restart_clock()
        return {} if loss is None else {"val/loss": loss}

    def _show(self, row: Row) -> None:
        for sink in self._sinks:
            sink.show(row)

    # What the base asks for.

    def identity(self) -> dict[str, Any]:
        """The trajectory's keys and the data set's fingerprint."""
        return super().identity() | {"config.data": self.dataset.fingerprint}

    def resolved_spec(self) -> ExecutionSpec:
        """The spec with mesh, vocabulary and micro-batch filled in."""
        spec = super().resolved_spec()
        config: dict[str, Any] = dict(spec.config)
        config["train"] = config["train"] | {"micro_batch_examples": self.layout.micro_batch_examples}
        if "vocabulary_size" in config["model"]:
            config["model"] = config["model"] | {"vocabulary_size": self.vocabulary_size}
        mesh = self.topology.mesh.model_copy(update={axis: int(size) for axis, size in self.mesh.shape.items()})
        topology = self.topology.model_copy(update={"mesh": mesh})
        return spec.model_copy(update={"config": config, "topology": topology})

    def manifest_record(self) -> dict[str, Any]:
        """Step and identity, and the hardware with the micro-batch chosen for it."""
        hardware = self._hardware() | {"micro_batch_examples": self.layout.micro_batch_examples}
        return super().manifest_record() | {"topology": hardware}

    def check_state(self) -> None:
        """Raise `DivergedError` if the state is no longer finite. Waits for the device."""
        self.window.fetch()

    def metric(self, name: str) -> float | None:
        """The value in the row of this step."""
        rows = self.metrics.rows()[-1:] if self.hosts.is_main else []
        value = rows[0].get(name) if rows and rows[0]["step"] == self.step else None
        return None if value is None else float(value)

    def companions(self) -> dict[str, bytes]:
        """The rows so far: in a bucket they may be behind a state of the fast tier."""
        return {METRICS: b"".join(encode_line(row) for row in self.metrics.rows())}

    def before_commit(self) -> None:
        """Rows are never behind a checkpoint."""
        self.metrics.sync()

    def result(self) -> dict[str, Any]:
        """Step, tokens, losses and fingerprint."""
        rows = self.metrics.rows() if self.hosts.is_main else []
        row = self.hosts.agree(rows[-1] if rows else None) or {}
        result = super().result()
        return {
            "step": self.step,
            "tokens": tokens_at(self.step, self.config.tokens_per_step),
            "train_loss": row.get("train/loss"),
            "val_loss": row.get("val/loss"),
            "fingerprint": result["fingerprint"],
        }
