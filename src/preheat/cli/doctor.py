"""Find out why something doesn't work, or why there are no hits: settings, engines, L2, gateway.

    preheat doctor http://gpu-1:8000 http://gpu-2:8000 why these servers' cached tokens are zero
    preheat doctor --log requests.jsonl                where the prompts of a log part
    preheat doctor --config preheat.toml               all that these settings name
    preheat doctor --upstream http://gpu-1:8000        one engine
    preheat doctor --gateway http://127.0.0.1:8000     a running gateway, too

Servers that are named without an option are taken for equal ones, and compared; before anything is
asked of them it says how much that is at most. Of a log it tells places and kinds of text, never text.

With --config or --upstream it asks each engine a handful of small real requests (about 3,000 input and 70 output tokens in
all; a hosted one bills them): what an engine tells of its usage and of its prefix cache can be seen
in no other way. --no-ask leaves them out. It changes nothing, but for freeing the places of dead
readers in L2. docs/doctor.md explains each finding.

Exit code 1 where there is a problem, else 0; 2 for wrong usage.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from preheat import config, wiring
from preheat.errors import ConfigError

if TYPE_CHECKING:
    from preheat.lab.doctor.examination import Order
    from preheat.lab.doctor.finding import Finding

_TIMEOUT_S: Final = 60.0
_WITHIN_S: Final = 300.0
_WORDS: Final = ("problem", "warning", "unknown", "note")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("urls", nargs="*", metavar="URL", help="servers that are to be equal")
    parser.add_argument("--log", type=Path, metavar="FILE", help="requests, a JSON object a line")
    parser.add_argument(
        "--events",
        action="append",
        default=[],
        metavar="ENDPOINT",
        help="of KV events, as in the engine's --kv-events-config; one for each URL, in their order",
    )
    parser.add_argument("--adapter", default="", metavar="NAME", help="an adapter clients ask for")
    parser.add_argument(
        "--within", type=_seconds, default=_WITHIN_S, metavar="S", help="for all of it (300)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, in TOML")
    parser.add_argument("--upstream", metavar="URL", help="an engine, as serve --upstream has it")
    parser.add_argument("--gateway", metavar="URL", help="a running gateway")
    parser.add_argument("--model", default="", metavar="NAME", help="a model that clients ask for")
    parser.add_argument(
        "--api-key-env",
        metavar="VAR",
        help="environment variable with the key of --upstream, or of each URL",
    )
    parser.add_argument(
        "--gateway-key-env", metavar="VAR", help="environment variable with a key of the gateway's"
    )
    parser.add_argument(
        "--no-ask", action="store_true", help="send no requests that an engine has to compute"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=_TIMEOUT_S, metavar="S", help="for one answer (60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Examine and tell."""
    usage = _misuse(options)
    if usage:
        print(f"usage: preheat doctor [URL ...] [options]\n{usage}", file=sys.stderr)
        return 2
    findings, summary = asyncio.run(_examine(options))
    counts = Counter(finding.severity for finding in findings)
    if options.json:
        document: dict[str, Any] = {"verdict": summary} if summary else {}
        document |= {"findings": findings, "counts": counts}
        print(msgspec.json.encode(document).decode())
    else:
        told = [
            f"{counts[word]} {word}{'s' if counts[word] > 1 and word != 'unknown' else ''}"
            for word in _WORDS
            if counts[word]
        ]
        print("\n" + (", ".join(told) if told else "nothing to remark"))
    return 1 if counts["problem"] else 0


def _misuse(options: argparse.Namespace) -> str:
    """What is wrong with the options; nothing where nothing is."""
    if options.api_key_env and not (options.upstream or options.urls):
        return "--api-key-env needs --upstream or a URL"
    if len(options.events) > len(options.urls):
        return "--events needs a URL for each endpoint"
    if options.adapter and not options.urls:
        return "--adapter needs a URL"
    return ""


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


async def _examine(options: argparse.Namespace) -> "tuple[list[Finding], str]":
    """All findings, and what those about servers and a log come to, where there are any."""
    from preheat.lab.doctor.examination import examine, refused_settings

    environment = config.environment()
    findings: list[Finding] = []
    summary = ""
    if options.urls or options.log:
        findings, summary = await _diagnose(options, environment)
        if not (options.config or options.upstream or options.gateway):
            return findings, summary

    def note(finding: "Finding") -> None:
        findings.append(finding)
        if not options.json:
            print(_text(finding), flush=True)

    try:
        settings = config.load(options.config, environment, _overrides(options))
        order = _order(options)
    except ConfigError as error:
        note(refused_settings(error))
        return findings, summary
    async for finding in examine(_what(settings, options), order, environment):
        note(finding)
    return findings, summary


async def _diagnose(
    options: argparse.Namespace, environment: Mapping[str, str]
) -> "tuple[list[Finding], str]":
    """The servers and the log: all is found before it is told, so that the verdict comes first."""
    from preheat.lab.diagnosis.diagnosis import Order, diagnose, promise
    from preheat.lab.diagnosis.summary import verdict
    from preheat.lab.doctor.examination import refused_settings

    findings: list[Finding] = []
    try:
        for url in options.urls:
            _check_url(url, "URL")
        variable = options.api_key_env
        key = config.secret_from(variable, "--api-key-env", environment) if variable else ""
        order = Order(
            urls=options.urls,
            endpoints=options.events,
            log=options.log,
            api_key=key,
            model=options.model,
            adapter=options.adapter,
            asks=not options.no_ask,
            timeout_s=options.timeout,
            within_s=options.within,
        )
        print(promise(order), file=sys.stderr, flush=True)
        findings = [finding async for finding in diagnose(order)]
    except ConfigError as error:
        findings.append(refused_settings(error))
    summary = verdict(findings)
    if not options.json:
        print(f"{summary}\n")
        for finding in sorted(findings, key=_weight):
            if finding.severity != "ok":
                print(_text(finding))
        for about in dict.fromkeys(one.about for one in findings):
            fine = [one.check for one in findings if one.about == about and one.severity == "ok"]
            if fine:
                print(f"{'ok':<8} {about}: {', '.join(fine)}")
    return findings, summary


def _weight(finding: "Finding") -> int:
    return _WORDS.index(finding.severity) if finding.severity in _WORDS else len(_WORDS)


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if options.upstream is not None:
        overrides["engines.upstream.url"] = options.upstream
    if options.api_key_env:
        overrides["engines.upstream.api_key_env"] = options.api_key_env
    return overrides


def _what(settings: config.Settings, options: argparse.Namespace) -> config.Settings:
    """The settings as serve has them; a gateway alone says nothing of the engine behind it."""
    if options.gateway and not options.config:
        return settings
    return wiring.with_defaults(settings)


def _order(options: argparse.Namespace) -> "Order":
    from preheat.lab.doctor.examination import Order

    key = ""
    if options.gateway is not None:
        _check_url(options.gateway, "--gateway")
    if options.gateway_key_env:
        key = config.secret_from(options.gateway_key_env, "--gateway-key-env", config.environment())
    return Order(
        gateway=options.gateway or "",
        gateway_key=key,
        model=options.model,
        asks=not options.no_ask,
        timeout_s=options.timeout,
    )


def _check_url(url: str, option: str) -> None:
    """Raises ConfigError for what is no server's address: the same rules as for an engine's."""
    try:
        config.check({"engines": {"it": {"url": url}}})
    except ConfigError as error:
        raise ConfigError(str(error).replace("engines.it.url", option)) from None


def _text(finding: "Finding") -> str:
    lines = [f"{finding.severity:<8} {finding.about}: {finding.found}  [{finding.check}]"]
    if finding.asked:
        lines.append(f"{'':<9}asked: {finding.asked}")
    if finding.why:
        lines.append(f"{'':<9}why it matters: {finding.why}")
    if finding.do:
        lines.append(f"{'':<9}what to do: {finding.do}")
    return "\n".join(lines)
