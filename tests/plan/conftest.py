"""Fixtures for tests of plans."""

from collections.abc import Iterator

import jax
import pytest

from tests.support.libtpu import lock_libtpu


@pytest.fixture(autouse=True, scope="session")
def _started_backend() -> None:
    """Initialise jax with all devices of the tests; a plan for fewer would otherwise limit later tests to these."""
    jax.devices()


@pytest.fixture
def libtpu() -> Iterator[None]:
    """Lock libtpu for a test whose subprocesses use it."""
    with lock_libtpu():
        yield
