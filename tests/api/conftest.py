"""Models that the tests of the public functions share."""

import pytest
from api_models import of_pictures, over_bytes

from maskless import Model


@pytest.fixture(scope="module")
def plain(tiny) -> Model:
    return over_bytes(tiny, "position")


@pytest.fixture(scope="module")
def causal(tiny) -> Model:
    return over_bytes(tiny, "causal")


@pytest.fixture(scope="module")
def artist(tiny) -> Model:
    return of_pictures(tiny)
