"""Floor of the restart time: a hand-written program from its start to the first step after a restore.

It covers the interpreter, imports, distributed initialisation, a compilation served by the cache, a plain Orbax restore
and one step of the hand-written loop. Run it first with `--prepare`, which fills the cache and saves the state.

    python -m tests.benchmarks.restart_floor DIRECTORY [--prepare] [--place COORDINATOR N K]
"""

import argparse
from pathlib import Path

import flax.training.train_state  # noqa: F401
import jax
import numpy as np
import optax  # noqa: F401
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.benchmarks.hand_loop import Size, make_hand_step

SIZE = Size(layers=2, heads=4, width=64, sequence_length=64, batch_examples=32, vocabulary_size=256)  # gpt_nano


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--place", nargs=3)
    parsed = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(parsed.directory / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if parsed.place is not None:
        coordinator, num_processes, process_id = parsed.place
        jax.distributed.initialize(coordinator, int(num_processes), int(process_id))
    # NumPy arrays, since an array on one process's device cannot be resharded over the devices of several processes.
    step, *arrays = make_hand_step(SIZE, "scan")
    state, x_BxT, y_BxT = jax.tree.map(np.asarray, arrays)
    mesh = Mesh(jax.devices(), ("data",))
    replicated, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), state)
    batch = jax.ShapeDtypeStruct(x_BxT.shape, x_BxT.dtype, sharding=split)
    compiled = step.lower(abstract, batch, batch).compile()
    checkpointer = ocp.StandardCheckpointer()
    if parsed.prepare:
        checkpointer.save(parsed.directory / "state", jax.device_put(state, replicated))
        checkpointer.wait_until_finished()
    restored = checkpointer.restore(parsed.directory / "state", abstract)
    _, loss = compiled(restored, jax.device_put(x_BxT, split), jax.device_put(y_BxT, split))
    jax.block_until_ready(loss)


if __name__ == "__main__":
    main()
