"""Start-up: this process joins the others of its job, and gets the one object through which it talks with them."""

import jax
from jax._src import distributed

from runner.errors import RetryableError, first_line
from runner.hosts.agreement import Hosts
from runner.hosts.key_value import KeyValueStore
from runner.hosts.liveness import Liveness, exit_on_abort
from runner.hosts.placement import Placement
from runner.hosts.rendezvous import listening_address, meet
from runner.spec import Deadlines

HEARTBEAT_SECONDS = 60  # of JAX; the watchdog notices sooner, and says more


def start(placement: Placement | None, deadlines: Deadlines, is_elastic: bool = False) -> Hosts:
    """Join the job's other processes; None = this one is alone.

    Called on every host, before any other use of JAX. Blocks until all are there, at most `deadlines.start_seconds`.
    Raises `RetryableError` naming who did not come; an elastic job begins with those that came.
    """
    if placement is None:
        return Hosts.alone()
    meeting = meet(placement, deadlines.start_seconds, is_elastic)
    placement = meeting.placement
    if placement.num_processes == 1:
        return Hosts.alone()
    exit_on_abort()
    _join_coordinator(placement, deadlines)
    process_id, num_processes = placement.process_id, placement.num_processes
    store = KeyValueStore(distributed.global_state.client)
    liveness = Liveness(store, process_id, num_processes, meeting.peer_sockets)
    return Hosts(process_id, num_processes, store, liveness, deadlines.phase_seconds)


def _join_coordinator(placement: Placement, deadlines: Deadlines) -> None:
    """JAX's own start, with the coordination service in process 0. Its notice of preemption is `preemption`'s work."""
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=placement.coordinator,
            num_processes=placement.num_processes,
            process_id=placement.process_id,
            local_device_ids=placement.local_devices,
            coordinator_bind_address=listening_address(placement),
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            initialization_timeout=int(deadlines.start_seconds),
            shutdown_timeout_seconds=60,
        )
    except (RuntimeError, ValueError) as error:
        raise RetryableError(f"cannot join the other processes of the job: {first_line(error)}") from error
