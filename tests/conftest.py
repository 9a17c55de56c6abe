"""Fixtures that several folders of tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Fake, Gateway

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What programs keep for their user goes to a folder of the tests'."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
            patch.setenv(variable, str(tmp_path_factory.mktemp("home")))
        yield


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
