"""tau-bench's trajectories (Yao et al., 2024): conversations of a user, an agent and its tools.

Each of the agent's messages was one request, whose prompt is all that stands before it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from preheat.traces.arrival import UNKNOWN, Arrival
from preheat.traces.calendar import Session, placed
from preheat.traces.numbering import CHUNK_TOKENS, TEXT_RULE, Numbering, tokens_of
from preheat.traces.reader import Draft, Format, Reading
from preheat.traces.source import Head, Source


class _Line(msgspec.Struct):
    task_id: int
    traj: Annotated[list[Raw], Meta(min_length=1)]
    trial: int = 0


class _Message(msgspec.Struct):
    role: str
    tool_calls: Any = None


_MESSAGE: Final = msgspec.json.Decoder(_Message)


def _recognises(head: Head) -> bool:
    return head.has("task_id", "traj")


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    rules = reading.rules
    reading.tell(TEXT_RULE)
    reading.tell(f"The requests of a session come {rules.turn_s:g} s apart.")
    texts, keys = Numbering(), Numbering()
    sessions = []
    decoder = msgspec.json.Decoder(_Line)
    for source in sources:
        for number, line in reading.records(source, decoder):
            name = f"{source.prefix}{line.task_id}-{line.trial}"
            try:
                arrivals = _requests(line, name, rules.turn_s, texts, keys)
            except msgspec.MsgspecError:
                reading.refuse(source, number, "a message without a role")
                continue
            if arrivals:
                sessions.append(Session(name, arrivals))
    return Draft(
        arrivals=placed(sessions, reading),
        block_tokens=CHUNK_TOKENS,
        times="rule",
        is_ordered=True,
    )


def _requests(
    line: _Line, name: str, turn_s: float, texts: Numbering, keys: Numbering
) -> list[Arrival]:
    arrivals: list[Arrival] = []
    prompt = b"["
    before = ""
    for raw in line.traj:
        message = _MESSAGE.decode(raw)
        if message.role == "assistant":
            turn = len(arrivals)
            arrivals.append(
                Arrival(
                    at=turn * turn_s,
                    id=f"{name}/{turn}",
                    session=name,
                    turn=turn,
                    key=keys.of_text(prompt),
                    input_tokens=tokens_of(prompt),
                    output_tokens=tokens_of(bytes(raw)),
                    blocks=texts.blocks(prompt),
                    think_s=turn_s if turn else UNKNOWN,
                    kind=before,
                    stop="tool_calls" if message.tool_calls else "stop",
                )
            )
        before = message.role
        prompt += bytes(raw) + b","
    return arrivals


FORMAT: Final = Format(_recognises, _read)
