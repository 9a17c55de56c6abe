"""The OpenAPI document names every route there is, and no other."""

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest

from preheat import __version__
from preheat.config import Settings
from preheat.engines.fake import Fake
from preheat.gateway.admin import AdminApp
from preheat.gateway.hosting import Alone
from preheat.gateway.openapi import document
from preheat.gateway.table import Table
from preheat.gateway.upstreams import Upstreams
from preheat.telemetry.logs import Log
from preheat.wire.openai import DIALECTS

LISTED = "/v1/models"
"""The one path of the relay's that Preheat answers itself."""


@pytest.fixture
def admin() -> Iterator[AdminApp]:
    log = Log(io.BytesIO())
    upstreams = Upstreams(Table({"e": Fake("e")}, {}, {"e": ""}, {}), b"")
    yield AdminApp(Settings, "", Alone(), upstreams, None, log, is_ready=lambda: True)
    log.close()


def described() -> set[tuple[str, str]]:
    return {
        (path, method.upper())
        for path, operations in document()["paths"].items()
        for method in operations
    }


def test_every_admin_route_is_described_with_its_methods(admin: AdminApp) -> None:
    routed = {
        (route.path, method)
        for route in admin.routes
        for method in (route.methods or ()) - {"HEAD"}
    }
    assert described() - of_inference() == routed


def test_every_dialect_is_described() -> None:
    assert of_inference() == {(path.decode(), "POST") for path in DIALECTS} | {(LISTED, "GET")}


def of_inference() -> set[tuple[str, str]]:
    return {(path, method) for path, method in described() if path.startswith("/v1/")}


def operations() -> list[dict[str, Any]]:
    return [one for path in document()["paths"].values() for one in path.values()]


def test_operations_have_names_of_their_own_a_sentence_and_answers() -> None:
    names = [operation["operationId"] for operation in operations()]
    assert len(set(names)) == len(names)
    assert all(operation["summary"] and operation["responses"] for operation in operations())


def test_every_reference_leads_somewhere() -> None:
    schemas = document()["components"]["schemas"]
    found = re.findall(r"'\$ref': '([^']+)'", repr(document()))
    assert found
    assert {name.removeprefix("#/components/schemas/") for name in found} <= set(schemas)


def test_the_document_is_of_this_version() -> None:
    assert document()["info"]["version"] == __version__
    assert document()["openapi"].startswith("3.1")
