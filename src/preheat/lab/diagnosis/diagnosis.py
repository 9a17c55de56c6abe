"""The whole examination of some servers and a log, in an order in which each step needs the one
before."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from preheat.errors import ConfigError, EngineError
from preheat.lab.diagnosis import events, remedies, wording
from preheat.lab.diagnosis.comparing import Patient, compare
from preheat.lab.diagnosis.facts import facts_of
from preheat.lab.diagnosis.levers import (
    adapter_findings,
    metrics_finding,
    priority_finding,
    slot_findings,
)
from preheat.lab.diagnosis.log import examine_log, read_log
from preheat.lab.diagnosis.reuse import examine_reuse, words_for
from preheat.lab.diagnosis.server import (
    MOST_COMPUTED,
    MOST_FREE,
    TRUNK_TOKENS,
    OutOfBudgetError,
    Server,
    Target,
)
from preheat.lab.doctor.engine import EngineCase, examine_engine
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.probes import text_of

_BLOCKING: Final = frozenset({"engine-is-gateway", "no-model", "model-unknown"})


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to examine. `endpoints`: of KV events, one a server in their order. `asks`: prompts may be
    computed. `within_s` bounds all of it, `timeout_s` one answer."""

    urls: Sequence[str] = ()
    endpoints: Sequence[str] = ()
    log: Path | None = None
    api_key: str = ""
    model: str = ""
    adapter: str = ""
    asks: bool = True
    timeout_s: float = 60.0
    within_s: float = 300.0


def promise(order: Order) -> str:
    """How much will be asked at most, said before it begins."""
    if not order.urls:
        return "nothing is asked of any server"
    prompts = (
        f"at most {MOST_COMPUTED} prompts of up to {TRUNK_TOKENS} tokens, each with one token of answer "
        "(a healthy one gets about 6)"
        if order.asks
        else "no prompts"
    )
    return (
        f"each of {len(order.urls)} server{'s' * (len(order.urls) > 1)} is asked {prompts} and at most "
        f"{MOST_FREE} questions that cost no computing, within {order.within_s:g} s in all"
    )


async def diagnose(order: Order) -> AsyncIterator[Finding]:
    """All findings, as they come. Raises ConfigError for a log or an endpoint that can't be used."""
    deadline = asyncio.get_running_loop().time() + order.within_s
    log = read_log(order.log) if order.log is not None else None
    patients: list[Patient] = []
    for number, url in enumerate(order.urls):
        endpoint = order.endpoints[number] if number < len(order.endpoints) else ""
        target = Target(
            url=url,
            api_key=order.api_key,
            model=order.model,
            adapter=order.adapter,
            timeout_s=order.timeout_s,
        )
        examination = _examine(target, order, endpoint, patients)
        while True:
            finding = await _next(examination, deadline, url, order)
            if finding is None:
                break
            yield finding
    for finding in compare(patients, has_events=bool(order.endpoints)):
        yield finding
    if order.log is not None and log is not None:
        facts = patients[0].facts if patients else None
        kind = patients[0].server.dialect.name if patients else ""
        for finding in examine_log(order.log.name, *log, facts, kind):
            yield finding


async def _next(
    examination: AsyncIterator[Finding], deadline: float, url: str, order: Order
) -> Finding | None:
    """The next one; None at the end, and after what ends an examination."""
    try:
        async with asyncio.timeout_at(deadline):
            return await anext(examination, None)
    except TimeoutError:
        return Finding(
            "out-of-time",
            url,
            "unknown",
            f"the examination took longer than {order.within_s:g} s, and isn't complete",
            do="give it more time with --within, or see whether the server is overloaded",
        )


async def _examine(
    target: Target, order: Order, endpoint: str, patients: list[Patient]
) -> AsyncIterator[Finding]:
    """One server, until something stands in the way."""
    case = EngineCase(
        about=target.url,
        url=target.url,
        api_key=target.api_key,
        models={"--model": target.model} if target.model else {},
        asks=False,
        timeout_s=target.timeout_s,
    )
    is_blocked = False
    async for finding in examine_engine(case):
        is_blocked |= finding.severity == "problem" or finding.check in _BLOCKING
        yield finding
    if is_blocked:
        return
    server = Server(target)
    try:
        async for finding in _server(server, order, endpoint, patients):
            yield finding
    except EngineError as error:
        yield server.unreachable(error)
    except OutOfBudgetError as error:
        yield server.finding(
            "out-of-budget",
            "unknown",
            f"{error}, so not all was found out",
            do="ask one thing at a time",
        )


async def _server(
    server: Server, order: Order, endpoint: str, patients: list[Patient]
) -> AsyncIterator[Finding]:
    await server.meet()
    if server.dialect.name == "anthropic":
        yield server.finding("reuse", "unknown", f"{remedies.NAMES['anthropic']} isn't examined")
        return
    facts = await facts_of(server)
    patient = Patient(server, facts, await wording.wording_of(server, facts))
    patient.words = await words_for(server, facts)
    patients.append(patient)
    if order.asks:
        yield await examine_reuse(server, facts, patient.words)
    yield metrics_finding(server, facts)
    for finding in wording.template_findings(server.about, patient.wording):
        yield finding
    for finding in adapter_findings(server, facts):
        yield finding
    if order.asks:
        async for finding in _levers(patient):
            yield finding
        if endpoint:
            # The same prompt for all, or their hashes can't be compared.
            yield await _events(patients, endpoint)


async def _levers(patient: Patient) -> AsyncIterator[Finding]:
    priority = await priority_finding(patient.server, patient.facts)
    if priority is not None:
        yield priority
    async for finding in slot_findings(patient.server, patient.facts):
        if finding.check.startswith("cache-ram"):
            patient.facts.has_host_cache = {"ok": True, "warning": False}.get(finding.severity)
        yield finding


async def _events(patients: Sequence[Patient], endpoint: str) -> Finding:
    patient = patients[-1]
    text = patient.text = patients[0].text or text_of(patient.words)
    try:
        finding, patient.told = await events.examine_events(
            patient.server, patient.facts, endpoint, text
        )
    except ConfigError as error:
        return patient.server.finding("events", "unknown", str(error), asked=f"{endpoint}")
    return finding
