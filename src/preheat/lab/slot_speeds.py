"""A llama.cpp server's slots: how fast it computes a prompt, saves it to a file and loads it back."""

import random
import time
from typing import Final

import msgspec

from preheat.core.costs import ServiceModel, model_of, prefill_row
from preheat.core.least_squares import NonNegative
from preheat.core.slot_ways import Speed
from preheat.engines.dialects.calls import Call, Prompt
from preheat.engines.dialects.llamacpp import LlamaCpp
from preheat.engines.direct import Direct
from preheat.errors import EngineError

FILES: Final = ("preheat-tiers.kv", "preheat-tiers-before.kv")
"""What is left in the server's folder where that isn't ours: the measured slot, and what was in it."""
_DIALECT: Final = LlamaCpp()
_TEXT: Final = "The quick brown fox jumps over the lazy dog, and nobody knows why it should. " * 4
_SHARES: Final = (0.25, 0.5, 1.0)
_RUNS: Final = 5
_SEED: Final = 20


class SlotSpeed(msgspec.Struct, frozen=True):
    """One server. `service` is its prefill, alone; bytes a second and latencies are those of whole
    calls, the server's and the disk's work together, with the file warm."""

    service: ServiceModel
    token_bytes: float
    save_bytes_per_s: float
    save_latency_s: float
    load_bytes_per_s: float
    load_latency_s: float
    tokens: int


async def slots(direct: Direct, tokens: int) -> SlotSpeed:
    """Computes prompts of up to `tokens` in an idle slot, and saves and loads each. What the slot held
    is put back. Raises EngineError with the reason where that can't be done."""
    found = [one for one in await direct.slots() or () if not one.is_busy]
    if not found:
        raise EngineError(f"{direct.url}: no idle slot (llama.cpp with --slots?)", kind="refused")
    slot = min(found, key=lambda one: (one.tokens or 0, one.number))
    if slot.ctx_tokens <= tokens:
        raise EngineError(
            f"{direct.url}: a slot holds {slot.ctx_tokens} tokens; give a smaller --tokens",
            kind="refused",
        )
    if slot.tokens:
        await _moved(direct, _DIALECT.save(slot.number, FILES[1]))
    try:
        return await _measured(direct, slot.number, tokens)
    finally:
        if slot.tokens:
            await _moved(direct, _DIALECT.restore(slot.number, FILES[1]))
        else:
            await _moved(direct, _DIALECT.erase(slot.number))


async def _measured(direct: Direct, slot: int, tokens: int) -> SlotSpeed:
    body = await direct.told(_DIALECT.tokenise(Prompt(text=_TEXT)))
    told = None if body is None else _DIALECT.read_tokens(body)
    if told is None or not told.ids:
        raise EngineError(f"{direct.url} doesn't tokenise", kind="refused")
    chance, fit = random.Random(_SEED), NonNegative(5)
    saving, loading = Speed(bytes_per_s=1e9), Speed(bytes_per_s=1e9)
    sizes: list[tuple[int, int]] = []
    for share in _SHARES:
        length = max(2, int(share * tokens))
        prompt = Prompt(ids=[chance.choice(told.ids) for _ in range(length)], slot=slot)
        took_s = await _computed(direct, prompt)
        fit.add(prefill_row(length, 0, 1), took_s, 1.0 / took_s**2)
        for _ in range(_RUNS):
            size, took_s = await _moved(direct, _DIALECT.save(slot, FILES[0]))
            saving.learn(size, took_s)
        sizes.append((length, size))
        for _ in range(_RUNS):
            size, took_s = await _moved(direct, _DIALECT.restore(slot, FILES[0]))
            loading.learn(size, took_s)
    (least, least_bytes), (most, most_bytes) = sizes[0], sizes[-1]
    return SlotSpeed(
        model_of(fit.solution()),
        (most_bytes - least_bytes) / (most - least),
        _rate(saving),
        saving.latency_s,
        _rate(loading),
        loading.latency_s,
        tokens,
    )


async def _computed(direct: Direct, prompt: Prompt) -> float:
    """Seconds of a prefill from nothing."""
    await _moved(direct, _DIALECT.erase(prompt.slot or 0))
    call = _DIALECT.warm(prompt)
    assert call is not None
    began_at = time.perf_counter()
    status, body = await direct.ask(call)
    took_s = time.perf_counter() - began_at
    cached = _DIALECT.read_cached(body)
    if status != 200 or cached is None or cached.cached_tokens:
        raise EngineError(f"{direct.url}: a prompt wasn't computed (HTTP {status})", kind="refused")
    return took_s


async def _moved(direct: Direct, call: Call | None) -> tuple[int, float]:
    """Bytes and seconds."""
    assert call is not None
    began_at = time.perf_counter()
    moved = _DIALECT.read_moved(*await direct.ask(call))
    took_s = time.perf_counter() - began_at
    if not moved.ok:
        raise EngineError(f"{direct.url}: {moved.why}", kind="refused")
    return moved.size_bytes or 0, took_s


def _rate(speed: Speed) -> float:
    return 1.0 / max(1e-12, speed.byte_s)
