"""Every host trains on the same data, from the first step to the last. Called on every host."""

from runner.data import Dataset
from runner.errors import DataError
from runner.hosts.agreement import Hosts


def refuse_different_data(dataset: Dataset, hosts: Hosts) -> None:
    """Raise `DataError` on every host if one reads other data than process 0."""
    fingerprints = hosts.gather(dataset.fingerprint)
    different = [process for process, other in enumerate(fingerprints) if other != fingerprints[0]]
    if different:
        raise DataError(f"{dataset.source}: processes {different} read other data than process 0")


def refuse_changed_data(dataset: Dataset, hosts: Hosts) -> None:
    """Before a state is saved: raise `DataError` if a token file is not what it was at the start.

    Every host looks, and hears what host 0 has seen: where they share the files all of them end with 2. A host that
    alone sees a change, in a copy of its own, ends so alone; the others then lose a peer.
    """
    problem = None
    try:
        dataset.check()
    except DataError as error:
        problem = f"{error}; what was trained since the last commit is not saved"
    problem = hosts.agree(problem) or problem
    if problem is not None:
        raise DataError(problem)
