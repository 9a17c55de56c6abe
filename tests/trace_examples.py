"""A small file of every trace format, made here: lines that are right, and one that isn't."""

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from preheat.traces.arrival import Arrival, Trace


class Example(msgspec.Struct, frozen=True):
    """`lines` begin with a table's header, where there is one. `bad` can stand anywhere below it.
    `requests` is what each line after the header gives."""

    name: str
    lines: tuple[bytes, ...]
    bad: tuple[bytes, ...] = ()
    has_header: bool = False
    requests_per_line: int = 1

    @property
    def data(self) -> bytes:
        return b"".join(self.lines)

    @property
    def requests(self) -> int:
        return (len(self.lines) - self.has_header) * self.requests_per_line


SECRET = "the secret of the prompt"


def text(line: Any) -> bytes:
    return json.dumps(line).encode() + b"\n"


def table(columns: str, rows: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(f"{row}\n".encode() for row in (columns, *rows))


def mooncake(number: int, **changed: Any) -> dict[str, Any]:
    ids = [0, *range(10 * number, 10 * number + number % 4)]
    tokens = 512 * len(ids) - 100
    return {
        "timestamp": 100 * number,
        "input_length": tokens,
        "output_length": number,
        "hash_ids": ids,
        **changed,
    }


def weka(number: int, **changed: Any) -> dict[str, Any]:
    requests = [
        {
            "t": 10.0 * turn,
            "in": 64 * (40 + 10 * turn) + 7,
            "out": 5,
            "runs": [[1, 20], [1000 * number, 20 + 10 * turn]],
            "model": "m",
            "it": ["text"],
            "stop": "end_turn",
            "api": 2.0,
            "think": 1.0,
        }
        for turn in range(3)
    ]
    return {
        "id": f"s{number}",
        "scope": "global",
        "block_size": 64,
        "requests": requests,
        **changed,
    }


def weka_request(**changed: Any) -> dict[str, Any]:
    whole = weka(1)
    return {**whole, "requests": [{**whole["requests"][0], **changed}]}


def lmcache(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "timestamp": 1_760_428_242_722_568 + 1_000_000 * number,
        "input": SECRET * (30 + number),
        "output": "yes " * 10,
        "session_id": f"s{number % 3}",
        **changed,
    }


def taubench(number: int, **changed: Any) -> dict[str, Any]:
    said = [
        {"role": "system", "content": SECRET * 60},
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "answer"},
    ]
    return {"task_id": number, "trial": 0, "reward": 1.0, "traj": said, **changed}


def sharegpt(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "user": number % 4,
        "round": number // 4,
        "input": SECRET * (20 + number),
        "output_tokens": 9,
        **changed,
    }


def openai(number: int, **changed: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": f"{SECRET * 40} {number % 5}"}]
    return {
        "timestamp": f"2026-01-02T03:04:{number % 60:02}Z",
        "session": f"s{number % 3}",
        "duration_ms": 500,
        "request": {"model": "m", "messages": said, "temperature": 0},
        "response": {
            "choices": [{"finish_reason": "stop", "message": {"content": "yes"}}],
            "usage": {"prompt_tokens": 250, "completion_tokens": 3},
        },
        **changed,
    }


def lines(make: Callable[[int], dict[str, Any]], count: int = 24) -> tuple[bytes, ...]:
    return tuple(text(make(number)) for number in range(count))


TORN = b'{"timestamp": 12, "inp\n'
RATES = "t_s,client,rate_rps,cv,pattern,arg1,arg2"
ALIBABA = (
    "gmt_create,predict_type,predict_status,exec_time_seconds,groupId,checkpoint_model_version_id"
)
ORACLE = struct.Struct("<IQIq")

EXAMPLES = {
    "mooncake": Example(
        "trace.jsonl",
        lines(mooncake),
        (
            TORN,
            text(mooncake(3, input_length=-4)),
            text(mooncake(3, timestamp=None)),
            text(mooncake(3, output_length="7")),
            text({"timestamp": 5}),
            text(mooncake(3, hash_ids=[1, 2, 3, 4, 5, 6, 7])),
            text(mooncake(3, hash_ids=[0, 30, 0, 31])),
            text(mooncake(3, hash_ids=[0, 30, 31, 2**63])),
            b'{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n',
            b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n',
            b'{"timestamp": "\xff"}\n',
            b"[" * 100_000 + b"\n",
        ),
    ),
    "weka": Example(
        "sessions.jsonl",
        lines(weka),
        (
            TORN,
            text(weka(3, requests=[])),
            text(weka(3, block_size=16)),
            text(weka_request(runs=[[1, 3]])),
            text(weka_request(t=-1.0)),
            text(weka(3, requests=list(reversed(weka(3)["requests"])))),
        ),
        requests_per_line=3,
    ),
    "lmcache": Example(
        "agents.jsonl",
        lines(lmcache),
        (TORN, text(lmcache(3, timestamp=-1)), text(lmcache(3, input=None))),
    ),
    "taubench": Example(
        "trajectories.jsonl",
        lines(taubench),
        (TORN, text(taubench(3, traj=[])), text(taubench(3, traj=[{"content": SECRET}]))),
        requests_per_line=2,
    ),
    "sharegpt": Example(
        "rounds.jsonl",
        lines(sharegpt),
        (TORN, text(sharegpt(3, output_tokens=-1)), text(sharegpt(3, input=4))),
    ),
    "openai": Example(
        "log.jsonl",
        lines(openai),
        (
            TORN,
            text(openai(3, timestamp="yesterday")),
            text(openai(3, timestamp=-3)),
            text(openai(3, request={"model": "m"})),
            text(openai(3, request=[SECRET])),
            text(openai(3, duration_ms=-1)),
            text(openai(3, timestamp=None)),
            text(openai(3, response={"usage": {"prompt_tokens": -1}})),
        ),
    ),
    "azure": Example(
        "code.csv",
        table(
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            [f"2023-11-16 18:17:{n:02}.9799600,{100 + n},{n}" for n in range(24)],
        ),
        (
            b"2023-11-16 18:17:03,12\n",
            b"2023-11-16 18:17:03,-1,2\n",
            b"2023-11-16 18:17:03,x,2\n",
            b"noon,1,2\n",
            b"\xff,1,2\n",
        ),
        has_header=True,
    ),
    "servegen": Example(
        "m.rate.csv",
        table(RATES, [f"{600 * n},{c},0.05,1,Gamma,0.8,20" for n in range(9) for c in range(2)]),
        (
            b"0,1,-0.5,1,Gamma,1,1\n",
            b"0,1,0.5,1,Zipf,1,1\n",
            b"0,1,nan,1,Gamma,1,1\n",
            b"0,1,0.5,1,Gamma,inf,1\n",
            b"0,1,0.5\n",
        ),
        has_header=True,
        requests_per_line=0,
    ),
    "burstgpt": Example(
        "minutes.csv",
        table("minute,total_tokens_per_s", [f"{n},{10.5 * (n % 3)}" for n in range(24)]),
        (b"1,-3\n", b"1,inf\n", b"1,nan\n", b"-1,2\n", b"1\n", b"1,x\n"),
        has_header=True,
        requests_per_line=0,
    ),
    "alibaba": Example(
        "requests.csv",
        table(
            ALIBABA,
            [f"2024-11-15 16:57:{n:02},T,SUCCEED,32.0,G{n % 3},M{n % 5}" for n in range(24)],
        ),
        (
            b"2024-11-15 16:57:50,T,SUCCEED,-2,G1,M1\n",
            b"2024-11-15 16:57:50,T,SUCCEED,nan,G1,M1\n",
            b"2024-11-15 16:57:50,T\n",
        ),
        has_header=True,
    ),
    "bing": Example(
        "queries.tsv",
        table(
            "Date\tQuery\tIsImplicitIntent\tCountry\tPopularityScore",
            [f"2020-01-{1 + n % 9:02}\tquery {n % 7}\tTrue\tPeru\t1" for n in range(24)],
        ),
        (
            b"2020-01-01\tq\tTrue\tPeru\t0\n",
            b"2020-01-01\tq\tTrue\tPeru\n",
            b"someday\tq\tTrue\tPeru\t4\n",
        ),
        has_header=True,
    ),
    "lirs": Example(
        "loop.trace", tuple(b"%d\n" % (n % 7) for n in range(24)), (b"-3\n", b"x\n", b"1 2\n")
    ),
    "adaptsize": Example(
        "a.tr",
        tuple(b"%d %d 100\n" % (n, n % 7) for n in range(24)),
        (b"1 2\n", b"1 2 0\n", b"1 -2 3\n", b"x y z\n"),
    ),
    "arc": Example(
        "OLTP.lis",
        tuple(b"%d 2 0 %d\n" % (n, n) for n in range(24)),
        (b"1 2 3\n", b"1 0 0 1\n", b"1 -1 0 1\n", b"1 99999999999 0 1\n"),
        requests_per_line=2,
    ),
    "oracle-general": Example(
        "x.oracleGeneral.bin",
        tuple(ORACLE.pack(n, n % 7, 64, -1 if n > 16 else n + 7) for n in range(24)),
        (ORACLE.pack(30, 3, 0, -1),),
    ),
    "int32": Example(
        "cache2k__x.trace", tuple(struct.pack(">I", n * 2_654_435_761 % 2**32) for n in range(64))
    ),
    "int64": Example("scarab__x.trace", tuple(struct.pack(">Q", 2**63 + n) for n in range(64))),
}
"""By format; `preheat` is written by the product itself."""

BAD_LINES = [
    (name, number) for name, example in EXAMPLES.items() for number in range(len(example.bad))
]


def small_trace() -> Trace:
    """Three sessions of four growing prompts."""
    arrivals = [
        Arrival(
            at=1.5 + 10 * turn + session,
            id=f"{session}-{turn}",
            session=f"s{session}",
            turn=turn,
            tenant="t",
            model="m",
            key=4 * session + turn,
            input_tokens=100 * (3 + turn) + 50,
            output_tokens=7,
            blocks=(0, 1, *range(100 * session + 2, 100 * session + 4 + turn)),
            think_s=2.5,
            ttft_s=0.25,
            service_s=1.5,
            kind="k",
            stop="s",
            agent="a",
            adapter="l",
            ends_session=turn == 3,
            sampled=session == 1,
        )
        for turn in range(4)
        for session in range(3)
    ]
    return Trace(name="small", format="test", arrivals=arrivals, block_tokens=100)
