"""KV events: do they come, from where, of whom, and do equal servers give equal hashes?"""

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from preheat.lab.diagnosis import remedies
from preheat.lab.diagnosis.ear import Block, Ear, Heard
from preheat.lab.diagnosis.facts import Facts
from preheat.lab.diagnosis.server import Server, chat
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.peer import shown
from preheat.wire.kv_places import Meeting, meet

_MEET_S: Final = 2.0
"""Reconnects are 100 ms apart."""
_TOLD_S: Final = 5.0
_COMPARED_TOKENS: Final = 4
"""Smaller blocks come twice in one prompt, behind other ones, so their hashes say nothing."""
_WHY: Final = "the index of what this server holds stays an estimate"
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Told(msgspec.Struct, frozen=True):
    """What one server's events said of the doctor's prompt: its blocks, and how they are spelled."""

    kind: str
    algorithm: str
    blocks: Sequence[Block]
    block_tokens: int
    form: str


async def examine_events(
    server: Server, facts: Facts, endpoint: str, text: str
) -> tuple[Finding, Told | None]:
    """Listen where the engine's endpoint says, then on the other side; have a prompt computed meanwhile.
    Raises EngineError, and ConfigError for what is no endpoint."""
    host = urlsplit(server.target.url).hostname or "127.0.0.1"
    first = meet(endpoint, host)
    heard = await _listen(server, first, text)
    if heard.is_connected:
        return await _judged(server, facts, heard, text)
    other = _other_side(endpoint, first, host)
    turned = await _listen(server, other, text) if other is not None else heard
    if turned.messages:
        _, told = await _judged(server, facts, turned, text)
        return _wrong_side(server, endpoint, turned), told
    return _nobody(server, endpoint, heard), None


def compare(tellings: Mapping[str, Told]) -> list[Finding]:
    """What differs between servers that had the same prompt: form, block size, hashes."""
    if len(tellings) < 2:
        return []
    about, all_told = " and ".join(tellings), list(tellings.values())
    asked = "the blocks of one prompt, in the events of each"
    found = []
    forms = {one.form for one in all_told}
    if len(forms) > 1:
        found.append(
            Finding(
                "event-format",
                about,
                "warning",
                f"their events are spelled in {len(forms)} ways: {'; '.join(sorted(forms))}",
                "Preheat reads both; other routers and indexers know one, and see nothing of the others",
                "run one version everywhere, with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES alike",
                asked,
            )
        )
    sizes = {one.block_tokens for one in all_told}
    if len(sizes) > 1 or min(sizes) < _COMPARED_TOKENS or len({one.kind for one in all_told}) > 1:
        return found
    names = [{(block.tokens, block.keys): block.name for block in one.blocks} for one in all_told]
    common = set(names[0]).intersection(*names[1:])
    if common:
        alike = all(len({one[block] for one in names}) == 1 for block in common)
        found.append(_hashes(about, all_told, asked, alike=alike))
    return found


def _hashes(about: str, told: Sequence[Told], asked: str, *, alike: bool) -> Finding:
    if alike:
        return Finding("hashes", about, "ok", "equal blocks have equal hashes", "", "", asked)
    algorithms = {one.algorithm for one in told if one.algorithm}
    named = f" ({', '.join(sorted(algorithms))})" if algorithms else ""
    differ = len(algorithms) > 1
    return Finding(
        "hash-algorithm" if differ else "hash-seed",
        about,
        "warning",
        f"the same tokens have other hashes on each: other algorithms{named}"
        if differ
        else f"the same tokens have other hashes on each, with the same algorithm{named}: their seeds "
        "(PYTHONHASHSEED, or the random root of xxhash) differ",
        "Preheat maps each server's hashes to its own, so it doesn't mind; what shares blocks by hash "
        "(LMCache, Mooncake, llm-d, Dynamo) finds none of another server's",
        remedies.HASH.get(told[0].kind, remedies.HASH["vllm"]),
        asked,
    )


async def _listen(server: Server, meeting: Meeting, text: str) -> Heard:
    async with Ear(meeting) as ear:
        if await ear.meets(_MEET_S):
            await server.compute(chat(server, text, "Go on."))
            await ear.hear(_TOLD_S)
        return ear.heard


async def _judged(
    server: Server, facts: Facts, heard: Heard, text: str
) -> tuple[Finding, Told | None]:
    """Of a publisher that is there."""
    asked = f"a prompt, while listening at {heard.meeting.address}"
    if heard.bad == heard.messages:  # or none came at all
        return _unheard(server, facts, heard, asked), None
    own = await _own(server, heard, text)
    if heard.blocks and not own:
        return server.finding(
            "events-foreign",
            "problem",
            f"events came ({heard.form}), but none of them is of the prompt that was computed",
            asked=asked,
            why="what another server holds would be taken for this one's",
            do="give each server its own endpoint; each data-parallel rank has the next port",
        ), None
    told = Told(server.dialect.name, facts.algorithm, own, heard.block_tokens, heard.form)
    if any(block.keys or block.lora_name for block in own):
        return _salted(server, own, asked), told
    return server.finding(
        "events",
        "ok",
        f"they come, as {heard.form}, of blocks of {heard.block_tokens}",
        asked=asked,
    ), told


def _unheard(server: Server, facts: Facts, heard: Heard, asked: str) -> Finding:
    """Nothing came that can be read."""
    if not heard.messages:
        return server.finding(
            "events-silent",
            "problem",
            "there is a publisher, but no event came of a prompt that was computed",
            asked=asked,
            why=_WHY,
            do=remedies.turn_on(server.dialect.name)
            if facts.caches is False
            else "see that this is this server's endpoint (each data-parallel rank has the next port), "
            "and that enable_kv_cache_events is true",
        )
    return server.finding(
        "events-unreadable",
        "problem",
        f"{heard.bad} messages came, and none can be read as KV events",
        asked=asked,
        why=_WHY,
        do="give the endpoint of --kv-events-config; this port is of something else, or of a version "
        "that Preheat doesn't know yet",
    )


def _salted(server: Server, own: Sequence[Block], asked: str) -> Finding:
    """A key that the doctor didn't send."""
    names = {block.lora_name for block in own if block.lora_name}
    what = f"the adapter {shown(min(names))}" if names else "a salt or another key"
    return server.finding(
        "salt-added",
        "problem",
        f"{what} is in the hash of a prompt that was sent without any",
        asked=asked,
        why="requests share a prefix only with those that have the same; one of its own for each shares "
        "with none",
        do="see what stands before the server and puts cache_salt (or another model's name) into "
        "requests; one salt a tenant is enough",
    )


async def _own(server: Server, heard: Heard, text: str) -> list[Block]:
    """The blocks that are of the doctor's prompt. Where its tokens can't be asked for, all."""
    body = await server.told(server.dialect.tokenise(chat(server, text, "Go on.")))
    tokens = server.dialect.read_tokens(body) if body is not None else None
    size = heard.block_tokens
    if tokens is None or tokens.ids is None or not size:
        return heard.blocks
    whole = {tuple(tokens.ids[at : at + size]) for at in range(0, tokens.count, size)}
    return [block for block in heard.blocks if block.tokens in whole]


def _other_side(endpoint: str, first: Meeting, host: str) -> Meeting | None:
    """Where they would meet if the engine did the other thing than its endpoint says."""
    scheme, _, place = endpoint.partition("://")
    if scheme != "tcp":
        return None
    port = place.rpartition(":")[2]
    name = f"[{host}]" if ":" in host else host
    if first.binds:
        return Meeting(f"tcp://{name}:{port}", binds=False)
    return Meeting(f"tcp://{name if host in _LOCAL else '*'}:{port}", binds=True)


def _wrong_side(server: Server, endpoint: str, turned: Heard) -> Finding:
    port = endpoint.rpartition(":")[2]
    listens = not turned.meeting.binds
    return server.finding(
        "events-wrong-side",
        "problem",
        f"{endpoint} says that the engine {'connects' if listens else 'listens'}, but it "
        f"{'listens' if listens else 'connects'}: events came when the doctor "
        f"{'connected to' if listens else 'listened at'} {turned.meeting.address}",
        asked="both sides of the endpoint",
        why="both wait for the other, and no event ever comes",
        do=f"write tcp://*:{port} as its endpoint in Preheat's settings"
        if listens
        else f'have the engine listen: "endpoint": "tcp://*:{port}" in its --kv-events-config',
    )


def _nobody(server: Server, endpoint: str, heard: Heard) -> Finding:
    kind = server.dialect.name
    asked = f"both sides of {endpoint}"
    if heard.error and heard.meeting.binds:
        port = endpoint.rpartition(":")[2]
        return server.finding(
            "events-wrong-side",
            "problem",
            f"with {endpoint} the engine connects to that address, which isn't this machine's or is taken "
            f"({heard.error})",
            asked=asked,
            why="nobody listens there, so no event ever comes",
            do=f'have the engine listen: "endpoint": "tcp://*:{port}" in its --kv-events-config; or give '
            "it this machine's address",
        )
    return server.finding(
        "events-off",
        "problem",
        f"nobody publishes at {endpoint}",
        asked=asked,
        why=_WHY,
        do=remedies.EVENTS.get(kind, "this server has no KV events: leave its endpoint out"),
    )
