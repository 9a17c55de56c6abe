"""The running gateway keeps what its OpenAPI document says, whatever it is asked."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks

from harness import Fake, Gateway
from preheat.gateway.openapi import document

WITHIN_S = 10

schema = schemathesis.openapi.from_dict(document())


def test_the_document_is_served(gateway: Gateway) -> None:
    assert gateway.get("/preheat/v1/openapi.json").json == document()


def asked(case: schemathesis.Case, gateway: Gateway) -> None:
    """The answer is one of those documented, and a fault of the server's only an engine's."""
    response = case.call(base_url=gateway.url, timeout=WITHIN_S)
    assert response.status_code < 500 or response.status_code in {502, 503, 504}
    kept = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
    ]
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        # OpenAPI 3.1 describes a stream as one text; schemathesis would look at every event.
        kept.append(checks.response_schema_conformance)
    case.validate_response(response, checks=kept)


politely = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@schema.parametrize()
@politely
def test_every_operation_answers_as_documented(case: schemathesis.Case, gateway: Gateway) -> None:
    asked(case, gateway)


@pytest.fixture
def failing(fake: Fake) -> Fake:
    fake.script(default={"fault": "reset"})
    return fake


@schema.include(path_regex="^/v1/").parametrize()
@politely
def test_every_operation_answers_as_documented_when_its_engine_fails(
    case: schemathesis.Case, gateway: Gateway, failing: Fake
) -> None:
    asked(case, gateway)


def test_nothing_of_it_was_a_defect(gateway: Gateway) -> None:
    assert '"event":"bug"' not in gateway.stderr
