"""An engine's KV cache in small, and its publisher: what vLLM's does, in both dialects."""

import queue
import threading
from collections import deque
from random import Random
from typing import Any

import msgspec

from preheat.core.kv_events import Batch, Cleared, Event, Removed, Stored
from preheat.core.tokens import chain_root, token_blocks

BLOCK = 4


def root(salt: str, lora_name: str) -> int:
    return chain_root(b"secret", "m", salt, lora_name)


class KvEngine:
    """Stores prompts block by block under hashes of its own; pushes out leaves."""

    def __init__(self, random: Random, block_tokens: int = BLOCK, *, clears: float = 0.02) -> None:
        self.random = random
        self.clears = clears
        self.seed = random.getrandbits(64)
        self.block_tokens = block_tokens
        self.blocks: dict[int, tuple[tuple[int, ...], int | None, set[str]]] = {}
        self.events: list[Event] = []

    def name_of(self, path: tuple[int, ...]) -> int:
        return hash((self.seed, path)) & (2**64 - 1)

    def store(self, tokens: list[int]) -> None:
        whole = len(tokens) // self.block_tokens
        paths = [tuple(tokens[: (one + 1) * self.block_tokens]) for one in range(whole)]
        new = [path for path in paths if "GPU" not in self._media(self.name_of(path))]
        if not new:
            return
        before = new[0][: -self.block_tokens]
        parent = self.name_of(before) if before else None
        for path in new:
            name = self.name_of(path)
            above = path[: -self.block_tokens]
            at = self.blocks.setdefault(name, (path, self.name_of(above) if above else None, set()))
            at[2].add("GPU")
        self.events.append(
            Stored(
                [self.name_of(path) for path in new],
                parent,
                [token for path in new for token in path[-self.block_tokens :]],
                self.block_tokens,
            )
        )

    def offload(self, name: int) -> None:
        if "GPU" in self._media(name):
            self.blocks[name][2].add("CPU")
            self.events.append(Stored([name], self.blocks[name][1], [], self.block_tokens, "CPU"))

    def evict(self, medium: str) -> None:
        parents = {parent for _, parent, media in self.blocks.values() if medium in media}
        leaves = [
            name
            for name, (_, _, media) in self.blocks.items()
            if medium in media and name not in parents
        ]
        if leaves:
            name = self.random.choice(sorted(leaves))
            self.events.append(Removed([name], medium))
            self.blocks[name][2].discard(medium)
            if not self.blocks[name][2]:
                del self.blocks[name]

    def clear(self) -> None:
        self.blocks.clear()
        self.events.append(Cleared())

    def act(self) -> None:
        """Anything."""
        match self.random.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                length = self.random.randrange(1, 24)
                self.store([self.random.randrange(2) for _ in range(length)])
            case 5 | 6 | 7:
                self.evict("GPU")
            case 8:
                self.evict("CPU")
            case _ if self.blocks:
                self.offload(self.random.choice(sorted(self.blocks)))
        if self.random.random() < self.clears:
            self.clear()

    def step(self, at: float) -> Batch:
        events, self.events = self.events, []
        return Batch(at, events)

    def holds(self) -> set[int]:
        """In our ids."""
        return {
            token_blocks(path, BLOCK, root("", ""))[-1]
            for path, _, media in self.blocks.values()
            if media
        }

    def _media(self, name: int) -> set[str]:
        return self.blocks[name][2] if name in self.blocks else set()


def as_arrays(batch: Batch) -> bytes:
    """SGLang, and vLLM to 0.22: everything by position, hashes signed."""

    def event(one: Event) -> list[Any]:
        match one:
            case Stored():
                parent = None if one.parent is None else _signed(one.parent)
                names = [_signed(name) for name in one.block_hashes]
                return [
                    "BlockStored", names, parent, one.token_ids, one.block_tokens, None, one.medium,
                ]  # fmt: skip
            case Removed():
                return ["BlockRemoved", [_signed(name) for name in one.block_hashes], one.medium]
            case Cleared():
                return ["AllBlocksCleared"]

    return msgspec.msgpack.encode([batch.at, [event(one) for one in batch.events], batch.rank])


def as_maps(batch: Batch) -> bytes:
    """vLLM since then: maps, hashes as bytes, and fields that we don't know."""

    def event(one: Event) -> dict[str, Any]:
        match one:
            case Stored():
                return {
                    "type": "BlockStored",
                    "block_hashes": [_bytes(name) for name in one.block_hashes],
                    "parent_block_hash": None if one.parent is None else _bytes(one.parent),
                    "token_ids": one.token_ids,
                    "block_size": one.block_tokens,
                    "lora_id": None,
                    "medium": one.medium,
                    "lora_name": None,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                    "locality": {"node": 1},
                }
            case Removed():
                names = [_bytes(name) for name in one.block_hashes]
                return {
                    "type": "BlockRemoved",
                    "block_hashes": names,
                    "medium": one.medium,
                    "group_idx": 0,
                }
            case Cleared():
                return {"type": "AllBlocksCleared"}

    events = [event(one) for one in batch.events]
    return msgspec.msgpack.encode(
        {"ts": batch.at, "events": events, "data_parallel_rank": batch.rank}
    )


class Publisher:
    """PUB and ROUTER on a thread, numbered from 0, with the last batches kept for replays."""

    def __init__(
        self,
        address: str,
        replay: str = "",
        *,
        buffer_steps: int = 100,
        binds: bool = True,
        names_topic: bool = True,
    ):
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._address, self._replay, self._binds = address, replay, binds
        # In replies: vLLM has it since June 2026, empty in the last one.
        self._topic, self._no_topic = ((b"kv",), (b"",)) if names_topic else ((), ())
        self._queue: queue.Queue[tuple[bytes, bool] | None] = queue.Queue()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(5)

    def publish(self, payload: bytes, *, is_lost: bool = False) -> None:
        """`is_lost`: on its way to the subscribers, not from the buffer."""
        self._queue.put((payload, is_lost))

    def interrupt(self) -> None:
        """The subscribers' connections break; they may come again at once."""
        self._queue.put((b"", True))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(5)
        assert not self._thread.is_alive()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        zmq = self._zmq
        live = self._context.socket(zmq.PUB)
        (live.bind if self._binds else live.connect)(self._address)
        router = self._context.socket(zmq.ROUTER)
        if self._replay:
            router.bind(self._replay)
        self._ready.set()
        number = 0
        while True:
            if self._replay and router.poll(0):
                client, _, first = router.recv_multipart()
                for at, payload in self._buffer:
                    if at >= int.from_bytes(first, "big"):
                        reply = (client, b"", *self._topic, at.to_bytes(8, "big"), payload)
                        router.send_multipart(reply)
                router.send_multipart((client, b"", *self._no_topic, b"\xff" * 8, b""))
            try:
                one = self._queue.get(timeout=0.02)
            except queue.Empty:
                continue
            if one is None:
                break
            payload, is_lost = one
            if not payload:
                live.unbind(self._address)
                live.close(linger=0)
                live = self._context.socket(zmq.PUB)
                live.bind(self._address)
                continue
            if not is_lost:
                live.send_multipart((b"kv", number.to_bytes(8, "big"), payload))
            self._buffer.append((number, payload))
            number += 1
        live.close(linger=200)
        router.close(linger=0)


def _signed(name: int) -> int:
    return name - 2**64 if name >= 2**63 else name


def _bytes(name: int) -> bytes:
    """As a SHA-256 whose low 64 bits these are."""
    return b"\x07" * 24 + name.to_bytes(8, "big")
