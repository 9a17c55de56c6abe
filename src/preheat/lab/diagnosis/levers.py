"""What Preheat needs beside the cache itself: metrics, priorities, adapters; and llama.cpp's slots."""

import difflib
from collections.abc import AsyncIterator, Iterator
from typing import Final

from preheat.engines.dialects.calls import Prompt
from preheat.lab.diagnosis import remedies
from preheat.lab.diagnosis.facts import Facts
from preheat.lab.diagnosis.server import Server, chat
from preheat.lab.doctor.finding import Finding
from preheat.lab.doctor.peer import shown
from preheat.lab.doctor.probes import text_of

_MOST_SLOTS: Final = 8
_SLOT_TOKENS: Final = 160
_KEPT_SHARE: Final = 0.5
_OWN: Final = 5
_NEAR: Final = 256


def metrics_finding(server: Server, facts: Facts) -> Finding:
    """Whether its load and its counts can be read."""
    kind = server.dialect.name
    if facts.has_metrics:
        return server.finding("metrics", "ok", "it tells its metrics", asked="GET /metrics")
    if kind not in remedies.METRICS:
        return server.finding("metrics", "ok", "hosted servers have none", asked="GET /metrics")
    return server.finding(
        "metrics-off",
        "warning",
        "GET /metrics gives none",
        asked="GET /metrics",
        why="its queue, its load and its own count of hits can't be seen: placing is blind there",
        do=remedies.METRICS[kind],
    )


async def priority_finding(server: Server, facts: Facts) -> Finding | None:
    """Whether a warm-up can stand behind clients' requests. Raises EngineError."""
    kind = server.dialect.name
    if server.dialect.priority_lower_first is None:
        return None
    takes, asked = facts.takes_priority, "what it says of its flags"
    if takes is None and kind == "vllm":
        asked = "one short chat with a priority"
        answer = await server.compute(
            chat(server, "Be brief.", text_of(_OWN)), priority=1, temperature=0
        )
        takes = {200: True, 400: False}.get(answer.status)
    if takes:
        return server.finding("priority", "ok", "it takes priorities", asked=asked)
    return server.finding(
        "priority-off",
        "unknown" if takes is None else "note",
        "whether it takes priorities can't be known"
        if takes is None
        else "requests with a priority are refused or all treated alike",
        asked=asked,
        why="warm-ups can't stand behind clients' requests in its queue; they wait for it to be idle",
        do=remedies.PRIORITY[kind],
    )


def adapter_findings(server: Server, facts: Facts) -> Iterator[Finding]:
    """Whether the adapter that is asked for is there, under that name, or could be loaded."""
    name, kind = server.target.adapter, server.dialect.name
    if not name:
        return
    known = (*facts.adapters, *facts.models)
    if name in known:
        yield server.finding("adapter", "ok", "it has the adapter of that name", asked="its list")
        return
    near = difflib.get_close_matches(name[:_NEAR], [one[:_NEAR] for one in known], 1)
    yield server.finding(
        "adapter-unknown",
        "problem",
        f"it has no adapter {shown(name)}; it has {', '.join(map(shown, facts.adapters)) or 'none'}",
        asked="its list of adapters",
        why="such requests fail, or are answered by the plain model, whose KV cache is another one",
        do=f"ask for {shown(near[0])}" if near else remedies.LORA.get(kind, "load it there"),
    )
    if facts.loads_adapters is False:
        yield server.finding(
            "lora-updating-off",
            "warning",
            "it loads no adapters while it runs",
            asked="whether the route to load one is there",
            why="Preheat can't bring an adapter to it before its requests come",
            do=remedies.LORA.get(kind, ""),
        )


async def slot_findings(server: Server, facts: Facts) -> AsyncIterator[Finding]:
    """llama.cpp: what becomes of a beginning when more of them come than it has slots."""
    slots = facts.capacity.slots
    if server.dialect.name != "llamacpp":
        return
    if not slots or slots > _MOST_SLOTS:
        yield server.finding(
            "cache-ram",
            "unknown",
            f"it has {slots} slots, and more than {_MOST_SLOTS} aren't tried"
            if slots
            else "it doesn't tell its slots",
            asked="GET /slots",
            do="start llama.cpp without --no-slots" if not slots else "",
        )
        return
    if facts.load.running:
        yield server.finding(
            "cache-ram",
            "unknown",
            "it is busy, so others would take its slots",
            asked="GET /metrics",
        )
        return
    kept, prompt_tokens = await _kept(server, slots)
    asked = f"{slots + 1} short beginnings in turn, then the first again: it has {slots} slots"
    if kept >= _KEPT_SHARE * prompt_tokens > 0:
        yield server.finding(
            "cache-ram", "ok", "what leaves a slot comes back from host memory", asked=asked
        )
        return
    yield server.finding(
        "cache-ram-off",
        "warning",
        f"it keeps {slots} beginnings and no more: of one that had left its slot {kept} tokens of "
        f"{prompt_tokens} were cached",
        asked=asked,
        why="with more conversations than slots each turn computes its whole prompt again",
        do=remedies.CACHE_RAM,
    )


async def _kept(server: Server, slots: int) -> tuple[int, int]:
    """Of the first beginning, after as many others as there are slots: cached, and all its tokens."""
    prompts = [_text(text_of(_SLOT_TOKENS // 5)) for _ in range(slots + 1)]
    for prompt in [*prompts, prompts[0]]:
        call = server.dialect.warm(prompt)
        assert call is not None
        answer = await server.computing(call)
    cached = answer.cached
    return (cached.cached_tokens or 0, cached.prompt_tokens) if cached is not None else (0, 0)


def _text(text: str) -> Prompt:
    return Prompt(text=text)
