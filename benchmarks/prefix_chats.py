"""Chats on one engine for `prefix_warm`, and what `preheat warm` and `preheat verify` say of it."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks import chat
from benchmarks.report import BenchmarkError
from preheat.engines.dialects.calls import Prompt
from preheat.engines.direct import Direct
from preheat.engines.prefixes import name_of
from preheat.engines.slot_files import SlotFiles
from preheat.transport.client import Client
from preheat.wire.sse import SseDecoder, data_of

ANSWER_TOKENS = 24
WORD_TOKENS = 1.02  # of `chat.TEXT`'s words, by SmolLM2's tokenizer
COMMAND_WITHIN_S = 300.0


class Asked(msgspec.Struct, frozen=True):
    """One chat: seconds from its sending, tokens said, tokens of its prompt that were cached; and
    seconds a token after the first."""

    ttft_s: float
    took_s: float
    tokens: int
    cached_tokens: int
    decode_s: float


def one_prefix(chance: random.Random, tokens: int) -> str:
    """A system prompt of about so many tokens."""
    return " ".join(chance.choices(chat.WORDS, k=int(tokens / WORD_TOKENS)))


class Place:
    """A running engine, and a folder for the commands' files."""

    def __init__(self, url: str, api_key: str, folder: Path) -> None:
        self._url = url
        self._api_key = api_key
        self._folder = folder
        self._questions = 0

    def ask(self, system: str) -> Asked:
        return self.ask_at_once(system, 1)[0]

    def ask_at_once(self, system: str, chats: int) -> list[Asked]:
        self._questions += chats
        questions = [f"Question {self._questions + i}: what is to be paid?" for i in range(chats)]
        return asyncio.run(_ask_all(self._url, self._api_key, system, questions))

    def warm(self, system: str, slack_s: float) -> dict[str, Any]:
        """By the command; its outcome."""
        extra = ("--keep", "--every-slot", "--slack", str(slack_s))
        code, document = self._command("warm", system, *extra)
        if code != 0:
            raise BenchmarkError(f"preheat warm ended with {code}: {document}")
        outcome: dict[str, Any] = document["outcomes"][0]["outcome"]
        return outcome

    def verdict(self, system: str) -> str:
        """By the command. Its exit code has to say the same."""
        code, document = self._command("verify", system)
        verdict: str = document["proofs"][0]["proof"]["verdict"]
        if code != (1 if verdict == "refuted" else 0):
            raise BenchmarkError(f"preheat verify ended with {code}, and said {verdict}")
        return verdict

    def restore(self, system: str) -> float:
        """From its file into one slot: the seconds that took."""

        async def restore(direct: Direct) -> float:
            await direct.known()
            began_at = time.perf_counter()
            found = await SlotFiles(direct).restore_into_idle(_name(system))
            if found is None:
                raise BenchmarkError("there is no slot file of a prefix that was warmed")
            return time.perf_counter() - began_at

        took_s: float = self._directly(restore)
        return took_s

    def fill(self, system: str, slots: int) -> None:
        """So many slots from its file."""

        async def fill(direct: Direct) -> None:
            files = SlotFiles(direct)
            for slot in range(slots):
                moved = await files.restore(_name(system), slot)
                if moved is None or not moved.ok:
                    raise BenchmarkError(f"slot {slot} wasn't filled: {moved}")

        self._directly(fill)

    def erase_all(self, slots: int) -> None:
        async def erase(direct: Direct) -> None:
            dialect = await direct.known()
            for call in dialect.reset(slots):
                done = dialect.read_reset(*await direct.ask(call))
                if not done.ok:
                    raise BenchmarkError(f"a slot wasn't erased: {done.why}")

        self._directly(erase)

    def kv_bytes(self) -> float:
        """Of what the slots hold: each is saved, and its file's size counted."""

        async def count(direct: Direct) -> float:
            files, total = SlotFiles(direct), 0
            for slot in await direct.slots() or ():
                if slot.tokens:
                    moved = await files.save("00", slot.number)
                    total += (moved and moved.size_bytes) or 0
            return float(total)

        size_bytes: float = self._directly(count)
        return size_bytes

    def _directly(self, work: Any) -> Any:
        async def run() -> Any:
            direct = Direct(self._url, api_key=self._api_key)
            try:
                return await work(direct)
            finally:
                await direct.aclose()

        return asyncio.run(run())

    def _command(self, name: str, system: str, *more: str) -> tuple[int, dict[str, Any]]:
        file = self._folder / "prefix.json"
        file.write_bytes(msgspec.json.encode(_messages(system)))
        command = [
            *(sys.executable, "-m", "preheat", name, str(file), "--url", self._url, "--json"),
            *("--api-key-env", "BENCH_KEY", "--state", str(self._folder / "state.json"), *more),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "BENCH_KEY": self._api_key},
            capture_output=True,
            timeout=COMMAND_WITHIN_S,
            check=False,
        )
        try:
            return done.returncode, msgspec.json.decode(done.stdout)
        except msgspec.DecodeError:
            raise BenchmarkError(f"preheat {name}: {done.stderr.decode()[-500:]}") from None


def _messages(system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}]


def _name(system: str) -> str:
    return name_of(Prompt(messages=_messages(system)))


async def _ask_all(url: str, api_key: str, system: str, questions: list[str]) -> list[Asked]:
    client = Client(f"http://{urlsplit(url).netloc}")
    try:
        return await asyncio.gather(
            *(chat_with(client, api_key, system, question) for question in questions)
        )
    finally:
        await client.aclose()


async def chat_with(client: Client, api_key: str, system: str, question: str) -> Asked:
    """One streamed chat, timed."""
    messages = [*_messages(system), {"role": "user", "content": question}]
    body = chat.body(messages, model="smol", stream=True, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    headers = [
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer " + api_key.encode()),
    ]
    began_at = time.perf_counter()
    response = await client.request(b"POST", chat.PATH.encode(), headers, body)
    if response.status != 200:
        raise BenchmarkError(f"status {response.status}: {(await response.read(10_000))!r}")
    first_at = last_at = 0.0
    usage: dict[str, Any] = {}
    decoder = SseDecoder()
    async for piece in response:
        now = time.perf_counter()
        for block in decoder.feed(piece):
            data = data_of(block)
            if data is None or data == b"[DONE]":
                continue
            event = msgspec.json.decode(data)
            usage = event.get("usage") or usage
            if any(one.get("delta", {}).get("content") for one in event.get("choices", ())):
                first_at = first_at or now
                last_at = now
    tokens = usage.get("completion_tokens", 0)
    if not first_at or tokens < 2:
        raise BenchmarkError("an answer without text")
    return Asked(
        ttft_s=first_at - began_at,
        took_s=last_at - began_at,
        tokens=tokens,
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        decode_s=(last_at - first_at) / (tokens - 1),
    )
