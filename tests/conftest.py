"""Fixtures that several folders of tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Fake, Gateway

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    """A fake engine of this module's."""
    engine = Fake()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def gateway(fake: Fake) -> Iterator[Gateway]:
    """A gateway with default settings before that engine."""
    served = Gateway(upstream=fake.url)
    yield served
    served.stop()


@pytest.fixture
def shared_data() -> Path:
    """The folder of evaluation data, which isn't part of the project."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"the evaluation data isn't here ({folder})")
    return folder
