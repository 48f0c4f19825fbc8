"""Fixtures of the tests of plans."""

from collections.abc import Iterator

import pytest

from tests.support.libtpu import held


@pytest.fixture
def libtpu() -> Iterator[None]:
    """For a test whose processes plan for TPUs."""
    with held():
        yield
