"""Fixtures of the tests of plans."""

from collections.abc import Iterator

import jax
import pytest

from tests.support.libtpu import lock_libtpu


@pytest.fixture(autouse=True, scope="session")
def _started_backend() -> None:
    """Start jax with all devices of the tests, since a plan for fewer would otherwise leave so few to later tests."""
    jax.devices()


@pytest.fixture
def libtpu() -> Iterator[None]:
    """Hold libtpu for a test whose processes plan for TPUs."""
    with lock_libtpu():
        yield
