"""What an entry of L1 costs in memory beside the bytes of its answer.

Fills an L1 without bounds through the core that serves, and compares the growth of this process with
the answers' bytes. The constant `ENTRY_OVERHEAD_BYTES`, which the budget counts for each entry,
should be no less.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
from pathlib import Path

from benchmarks.report import Progress, Result
from preheat import config
from preheat.core.inventory import ENTRY_OVERHEAD_BYTES
from preheat.core.types import Outcome, Request, RequestId, Usage
from preheat.telemetry.logs import Log
from preheat.wire import openai
from preheat.wiring import Parts, keyring

PAGE_BYTES = 4_096


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--entries", type=int, default=60_000, help="entries a round (60,000)")
    parser.add_argument("--answer-bytes", type=int, default=500, help="text of an answer (500)")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    settings = config.check({"l1": {"bytes": 10**12, "entries": 10**7}, "l2": {"kind": "off"}})
    parts = Parts(settings, Log(io.BytesIO()))
    keys = keyring(settings, bytes(32), lambda _: "group")
    partition = keys.partition("t", "/v1/chat/completions", "")
    overheads = []
    for turn in range(2):
        gc.collect()
        before, answers_bytes = _rss_bytes(), 0
        for number in range(turn * options.entries, (turn + 1) * options.entries):
            body = json.dumps(
                {
                    "model": "m1",
                    "temperature": 0,
                    "messages": [{"role": "user", "content": str(number)}],
                }
            ).encode()
            request = Request(RequestId(b"%x" % number), "t", "", keys.ask(body, partition))
            parts.controller.on_request(request, number * 1e-3)
            answer = _answer(number, options.answer_bytes)
            answers_bytes += answer.size_bytes
            usage = Usage(900 + number, 300, 0)
            at = number * 1e-3
            outcome = Outcome(request, at, 0.05, answer, answer.size_bytes, usage)
            parts.controller.on_outcome(outcome, "key-first-seen", at)
        gc.collect()
        overheads.append((_rss_bytes() - before - answers_bytes) / options.entries)
        progress.say(f"round {turn + 1}: {overheads[-1]:,.0f} bytes an entry beside its answer")
    figures = {"overhead_bytes": max(overheads), "accounted_overhead_bytes": ENTRY_OVERHEAD_BYTES}
    return Result(figures, {"entries": options.entries, "answer_bytes": options.answer_bytes})


def _answer(number: int, text_bytes: int) -> openai.Answer:
    message = {"role": "assistant", "content": "x" * text_bytes + str(number)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return openai.answer_of({"object": "chat.completion", "model": "m1", "choices": [choice]})


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
