"""llama.cpp's server: the one engine that can be told where a prefix lies.

Read and run: `xllamacpp` 2026.10.11549 (llama.cpp's build is the last number). Flags: `--metrics`,
`--slots`, `--slot-save-path`; all are on in the embedded engine but the last, which is
`slot_save_dir`.

- A slot's number is taken modulo their count, and the answer echoes the number that was asked: a
  wrong one saves or fills *another* slot. Check it against `slots()`.
- `cache_n` is what was reused. `tokens_cached` is what the slot holds afterwards.
- A request for a slot by `id_slot` doesn't look into the host-memory prompt cache; one without does.
  That cache takes what a slot held when another prompt takes the slot, whole sequences up to
  `--cache-ram` MiB, and forgets the oldest. No call tells of it or empties it: an erased slot's
  prefix may come back from there.
- A busy slot's prefix isn't shared, and an erase waits until the slot is free.
- A disconnect is noticed late while other slots produce: warm in `chunks`.
"""

import hashlib
import re
from typing import Any, Final

import msgspec

from preheat.engines.dialects.calls import Call, Prompt, get, post
from preheat.engines.dialects.openai import OpenAi, cached_in_usage, openai_call
from preheat.engines.dialects.readings import (
    Adapter,
    Cached,
    Capacity,
    Done,
    Load,
    Moved,
    Slot,
    Tokens,
    count,
    ids_of,
    objects,
    parsed,
    part,
    plus,
    why,
)
from preheat.engines.dialects.samples import Page

_RUNNING: Final = "llamacpp:requests_processing"
_WAITING: Final = "llamacpp:requests_deferred"
_FRESH: Final = "llamacpp:prompt_tokens"
_CACHED: Final = "llamacpp:prompt_tokens_cached"
_TOLD: Final = ["timings", "tokens_evaluated", "id_slot"]
"""Without this it echoes the prompt and every setting."""
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}[A-Za-z0-9_-]")
_WEIGHTS: Final = ("vocab_type", "n_vocab", "n_embd", "n_params", "n_ctx_train", "size", "ftype")
_ENCODE: Final = msgspec.json.Encoder(order="sorted").encode


class LlamaCpp(OpenAi):
    """Its prefixes are exact to the token, and whole sequences in slots."""

    name = "llamacpp"
    shares_running = False
    block_tokens = 1
    least_tokens = 0

    def health(self) -> Call:
        """503 while it loads."""
        return get("/health")

    def load(self) -> Call | None:
        """Not more often than every 5 s: it answers between two batches, and a disconnect isn't
        noticed while it is asked at 10 Hz."""
        return get("/metrics")

    def read_load(self, body: bytes) -> Load | None:
        """Its `prompt_tokens_total` counts only what was computed: both are put together here."""
        page = Page(body, (_RUNNING, _WAITING, _FRESH, _CACHED))
        if not page.of(_RUNNING, _WAITING):
            return None
        cached = page.sum(_CACHED)
        return Load(
            running=page.sum(_RUNNING),
            waiting=page.sum(_WAITING),
            cached_tokens_total=cached,
            prompt_tokens_total=plus(page.sum(_FRESH), cached) if cached is not None else None,
        )

    def capacity(self) -> Call | None:
        return get("/slots")

    def read_capacity(self, body: bytes) -> Capacity | None:
        """Of its slots; what host memory holds beside them it doesn't say. With one cache for all
        (`--kv-unified`) each slot has all of it, and the sum says too much."""
        slots = self.read_slots(body)
        if not slots:
            return None
        return Capacity(
            tokens=sum(slot.ctx_tokens for slot in slots),
            block_tokens=1,
            slots=len(slots),
            slot_tokens=min(slot.ctx_tokens for slot in slots),
        )

    def tokenise(self, prompt: Prompt, *, opens_answer: bool = True) -> Call | None:
        """Text only, as its own chat does it: marks are marks, and a beginning is added where the
        model wants one. Messages are rendered first."""
        if prompt.text is None:
            return None
        return post(
            "/tokenize", {"content": prompt.text, "add_special": True, "parse_special": True}
        )

    def read_tokens(self, body: bytes) -> Tokens | None:
        ids = ids_of(part(parsed(body), "tokens"))
        return None if ids is None else Tokens(len(ids), ids)

    def render(self, prompt: Prompt, *, opens_answer: bool = True) -> Call | None:
        if prompt.messages is None:
            return None
        return post(
            "/apply-template",
            {
                "messages": prompt.messages,
                "tools": prompt.tools,
                "add_generation_prompt": opens_answer,
            },
        )

    def read_rendered(self, body: bytes) -> str | None:
        text = part(parsed(body), "prompt")
        return text if isinstance(text, str) else None

    def warm(self, prompt: Prompt) -> Call | None:
        """Prefill alone, in a slot of its choice or in this one (it samples one token all the same
        and throws it away). Its adapters are numbers: None for any other name."""
        lora = None
        if prompt.adapter:
            number = _number(prompt.adapter)
            if number is None:
                return None
            lora = [{"id": number, "scale": 1.0}]
        where = {"id_slot": prompt.slot, "cache_prompt": True, "lora": lora}
        if prompt.messages is not None:
            chat = Prompt(model=prompt.model, messages=prompt.messages, tools=prompt.tools)
            return openai_call(chat, max_tokens=0, **where)
        text = prompt.text if prompt.ids is None else list(prompt.ids)
        return post(
            "/completion", {"prompt": text, "n_predict": 0, "response_fields": _TOLD, **where}
        )

    def read_cached(self, body: bytes) -> Cached | None:
        """`timings` first: every kind of answer has them."""
        value = parsed(body)
        cached = count(part(value, "timings", "cache_n"))
        fresh = count(part(value, "timings", "prompt_n"))
        if cached is not None and fresh is not None:
            return Cached(cached + fresh, cached, slot=count(part(value, "id_slot")))
        return cached_in_usage(part(value, "usage"))

    def adapters(self) -> Call | None:
        return get("/lora-adapters")

    def read_adapters(self, body: bytes) -> list[Adapter] | None:
        """Those it was started with, by number; one with scale 0 serves only who asks for it."""
        value = parsed(body)
        if not isinstance(value, list):
            return None
        return [
            Adapter(str(number), path if isinstance(path := one.get("path"), str) else "", _on(one))
            for one in objects(value)
            if (number := count(one.get("id"))) is not None
        ]

    def reset(self, slots: int = 1) -> list[Call]:
        """Each slot is erased; what lies in host memory stays."""
        return [self.erase(slot) for slot in range(slots)]

    def read_reset(self, status: int, body: bytes) -> Done:
        moved = self.read_moved(status, body)
        return Done(ok=moved.ok, why=moved.why)

    def slots(self) -> Call | None:
        return get("/slots")

    def read_slots(self, body: bytes) -> list[Slot] | None:
        value = parsed(body)
        if not isinstance(value, list):
            return None
        return [
            Slot(number, ctx_tokens, count(one.get("n_prompt_tokens")), bool(one["is_processing"]))
            for one in objects(value)
            if (number := count(one.get("id"))) is not None
            and (ctx_tokens := count(one.get("n_ctx"))) is not None
            and isinstance(one.get("is_processing"), bool)
        ]

    def save(self, slot: int, file_name: str) -> Call | None:
        return _slot_call(slot, "save", file_name)

    def restore(self, slot: int, file_name: str) -> Call | None:
        return _slot_call(slot, "restore", file_name)

    def erase(self, slot: int) -> Call:
        return post(f"/slots/{slot}?action=erase")

    def read_moved(self, status: int, body: bytes) -> Moved:
        """Refused with a 400: a bad name, a file that isn't there or is another model's, no room;
        with a 501: no `--slot-save-path`."""
        value = parsed(body)
        fields = ("n_saved", "n_restored", "n_erased")
        tokens = next((n for f in fields if (n := count(part(value, f))) is not None), None)
        if not 200 <= status < 300 or tokens is None:
            return Moved(ok=False, why=why(status, body))
        size = plus(count(part(value, "n_written")), count(part(value, "n_read")))
        return Moved(ok=True, tokens=tokens, size_bytes=size)


def model_identity(
    models: bytes, props: bytes, adapters: bytes = b"", *, weights: str = ""
) -> str | None:
    """What a slot file is bound to: 32 hex digits over what `/v1/models`, `/props` and
    `/lora-adapters` say of the model, and over `weights`, its sha256 or version where that is known.

    The server takes the file of any model of the same shape and computes on with its KV: nobody but
    us can tell them apart, and without `weights` neither can we where a file was replaced by one of
    the same size under the same path. None where the answers don't tell a model.
    """
    described = next(objects(part(parsed(models), "data")), {}).get("meta")
    path = part(parsed(props), "model_path")
    if not isinstance(described, dict) or not isinstance(path, str):
        return None
    active = [[one.get("path"), one.get("scale")] for one in objects(parsed(adapters)) if _on(one)]
    facts = [[described.get(name) for name in _WEIGHTS], path, active, weights]
    return hashlib.blake2b(_ENCODE(facts), digest_size=16).hexdigest()


def slot_file(identity: str, prefix: bytes) -> str:
    """The name of the file for a prefix of a model."""
    return f"{identity}-{prefix.hex()}.kv"


def _slot_call(slot: int, action: str, file_name: str) -> Call:
    if _FILE_NAME.fullmatch(file_name) is None or ".." in file_name:
        raise ValueError(
            f"a slot file's name has 2 to 128 letters, digits, - _ or . inside, not {file_name!r}"
        )
    return post(f"/slots/{slot}?action={action}", {"filename": file_name})


def _on(adapter: dict[str, Any]) -> bool:
    scale = adapter.get("scale", 1.0)
    return not isinstance(scale, int | float) or scale != 0


def _number(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdigit() and len(name) < 7 else None
