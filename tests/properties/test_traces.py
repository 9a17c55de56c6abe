"""Traces: damage is told and never a traceback; what is written is read again; calendars keep
their promises."""

import gzip
import lzma
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preheat.errors import TraceError
from preheat.traces.arrival import UNKNOWN, Arrival, Trace
from preheat.traces.calendar import Session, placed
from preheat.traces.reader import Reading
from preheat.traces.reading import read
from preheat.traces.rules import Rules
from trace_examples import EXAMPLES, SECRET, lines, text, weka

one_folder = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40
)

edits = st.lists(
    st.tuples(
        st.sampled_from(["cut", "put", "drop", "flip"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=8)
        | st.sampled_from([b"null", b"-1", b"1e400", b"{", b'"', b"\0", b"\xff", b"\n", b"[]"]),
    ),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, share, more in changes:
        place = int(share * len(data))
        if kind == "cut":
            data = data[:place]
        elif kind == "put":
            data = data[:place] + more + data[place:]
        elif kind == "drop":
            data = data[:place] + data[place + len(more) :]
        else:
            data = data[:place] + more + data[place + len(more) :]
    return data


@pytest.mark.parametrize("name", EXAMPLES)
@given(changes=edits, packing=st.sampled_from(["", "inside", "outside"]), on_bad=st.booleans())
@one_folder
def test_damage_is_told_and_never_a_traceback(
    name: str,
    changes: list[tuple[str, float, bytes]],
    packing: str,
    on_bad: bool,
    tmp_path: Path,
) -> None:
    example = EXAMPLES[name]
    data = example.data
    if packing == "outside":
        data = damaged(gzip.compress(data) if on_bad else lzma.compress(data), changes)
    else:
        data = damaged(data, changes)
        data = gzip.compress(data) if packing else data
    path = tmp_path / example.name
    path.write_bytes(data)
    for known in (name, None):
        try:
            trace = read(
                [path],
                format=known,
                on_bad="fail" if on_bad else "skip",
                rules=Rules(most_requests=20_000),
            )
        except TraceError as error:
            assert SECRET not in str(error)  # noqa: PT017 (it may well be read)
            continue
        ats = [one.at for one in trace.arrivals]
        assert ats == sorted(ats)
        assert all(map(math.isfinite, ats))
        assert all(SECRET not in bad.why and bad.line > 0 for bad in trace.bad)
        assert not on_bad or not trace.skipped


# What is written is read again

words = st.sampled_from(["", "a", "m/1", "\u00fc \u65e5\U0001f600", "x" * 40])
amounts = st.floats(0, 1e6, width=32) | st.just(float(UNKNOWN))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Arrivals whose blocks are chained and cover their prompts."""
    block_tokens = draw(st.sampled_from([0, 64, 128]))
    number_of: dict[Any, int] = {}
    arrivals = []
    at = 0.0
    for place in range(draw(st.integers(1, 6))):
        at += draw(st.integers(0, 10**9)) / 1e6
        tokens = draw(st.integers(0, 400))
        blocks: list[int] = []
        branch = draw(st.integers(0, 2))
        for start in range(0, tokens if block_tokens else 0, block_tokens or 1):
            is_whole = start + block_tokens <= tokens
            where = draw(st.integers(0, 1)) if start else branch
            name = (blocks[-1] if blocks else -1, where if is_whole else ("rest", place))
            blocks.append(number_of.setdefault(name, len(number_of)))
        arrivals.append(
            Arrival(
                at=at,
                id=f"r{place}",
                session=draw(words),
                turn=draw(st.integers(0, 99)),
                tenant=draw(words),
                model=draw(words),
                adapter=draw(words),
                key=draw(st.integers(-1, 3)),
                size_bytes=draw(st.integers(1, 2**32 - 1)),
                input_tokens=tokens,
                output_tokens=draw(st.integers(-1, 999)),
                blocks=tuple(blocks),
                think_s=draw(amounts),
                ttft_s=draw(amounts),
                service_s=draw(amounts),
                kind=draw(words),
                stop=draw(words),
                agent=draw(words),
                ends_session=draw(st.booleans()),
                sampled=draw(st.booleans()),
            )
        )
    times = draw(st.sampled_from(["measured", "rule", "order"]))
    return Trace(
        name="n",
        format="f",
        arrivals=arrivals,
        block_tokens=block_tokens,
        times=times,
        rules=("a rule",),
    )


def renamed(trace: Trace) -> list[tuple[tuple[int, ...], int]]:
    """Full blocks and keys, numbered by first appearance."""
    blocks: dict[int, int] = {}
    keys: dict[int, int] = {UNKNOWN: UNKNOWN}
    result = []
    for one in trace.arrivals:
        full = one.blocks[: one.input_tokens // trace.block_tokens] if trace.block_tokens else ()
        named = tuple(blocks.setdefault(block, len(blocks)) for block in full)
        result.append((named, keys.setdefault(one.key, len(keys))))
    return result


@given(traces())
@one_folder
def test_what_is_written_is_read_again(tmp_path: Path, trace: Trace) -> None:
    pytest.importorskip("pyarrow")
    from preheat.traces.writing import write

    path = tmp_path / "trace.parquet"
    write(trace, path)
    found = read([path], on_bad="fail")
    assert (found.block_tokens, found.times, found.rules) == (
        trace.block_tokens,
        trace.times,
        trace.rules,
    )
    assert renamed(found) == renamed(trace)
    for one, other in zip(found.arrivals, trace.arrivals, strict=True):
        assert one.at == pytest.approx(other.at, abs=1e-6)
        assert len(one.blocks) == len(other.blocks)
        for name in Arrival.__struct_fields__:
            if name not in ("at", "key", "blocks"):
                assert getattr(one, name) == getattr(other, name), name


# Calendars


@st.composite
def sessions(draw: st.DrawFn) -> list[Session]:
    """Prompts of trunk blocks below 10, then of the session's own."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        at = 0.0
        arrivals = []
        trunk = draw(st.integers(0, 3))
        for turn in range(draw(st.integers(1, 5))):
            own = range(100 * (number + 1), 100 * (number + 1) + turn + 1)
            blocks = (*range(trunk), *own)
            arrivals.append(Arrival(at=at, id=f"{number}/{turn}", turn=turn, key=1, blocks=blocks))
            at += draw(st.sampled_from([1.0, 60.0, 3_600.0, 40_000.0]))
        found.append(Session(f"s{number}", arrivals))
    return found


def calendar(found: list[Session], **rules: Any) -> list[Arrival]:
    return placed(found, Reading(Rules(**rules), "skip", None))


@given(found=sessions(), seed=st.integers(0, 9))
@settings(deadline=None)
def test_each_session_begins_once(found: list[Session], seed: int) -> None:
    arrivals = calendar(found, seed=seed, span_s=1_000.0)
    assert arrivals == calendar(found, seed=seed, span_s=1_000.0)
    assert Counter(one.id for one in arrivals) == Counter(
        one.id for session in found for one in session.arrivals
    )
    starts = [one.at for one in arrivals if one.turn == 0]
    assert all(0 <= start < 1_000 for start in starts)
    for session in found:
        at_of = {one.id: one.at for one in arrivals}
        first = session.arrivals[0]
        for one in session.arrivals:
            assert at_of[one.id] - at_of[first.id] == pytest.approx(one.at - first.at)


@given(found=sessions(), seed=st.integers(0, 9), trunk=st.integers(1, 4))
@settings(deadline=None)
def test_draws_share_trunks_and_nothing_else(found: list[Session], seed: int, trunk: int) -> None:
    mean_s = sum(_cut(session)[-1].at for session in found) / len(found)
    rules = {"sessions": "drawn", "seed": seed, "hours": 48.0, "trunk_sessions": trunk}
    if not mean_s:
        with pytest.raises(TraceError, match="no length"):
            calendar(found, **rules)
        return
    rules["open_sessions"] = 60 * mean_s / (48 * 3_600)  # some 60 draws
    arrivals = calendar(found, **rules)
    assert arrivals == calendar(found, **rules)
    original = {one.id: one for session in found for one in session.arrivals}
    # Of each session up to its long pause: which blocks many have.
    counts: Counter[int] = Counter()
    for session in found:
        counts.update({block for one in _cut(session) for block in one.blocks})
    trunks = {block for block, count in counts.items() if count >= trunk}
    new_of: dict[int, int] = {}
    drawn: dict[str, dict[int, int]] = defaultdict(dict)
    owner: dict[int, str] = {}
    for one in arrivals:
        assert one.at < 48 * 3_600
        was = original[one.id.partition("#")[0]]
        assert len(was.blocks) == len(one.blocks)
        for old, new in zip(was.blocks, one.blocks, strict=True):
            if old in trunks:
                assert new_of.setdefault(old, new) == new  # the same in every draw
            else:
                assert drawn[one.session].setdefault(old, new) == new
                assert owner.setdefault(new, one.session) == one.session
    assert not set(new_of.values()) & set(owner)
    assert len(set(new_of.values())) == len(new_of)


def _cut(session: Session) -> list[Arrival]:
    kept = [session.arrivals[0]]
    for one in session.arrivals[1:]:
        if one.at - kept[-1].at > 28_800:
            break
        kept.append(one)
    return kept


def test_a_calendar_holds_so_many_open_sessions(tmp_path: Path) -> None:
    """Little's law: the mean number open over the counted hours."""
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"".join(lines(weka, 30)))
    rules = Rules(sessions="drawn", open_sessions=10.0, hours=5.0, seed=3)
    found = read([path], rules=rules)
    ends: dict[str, list[float]] = defaultdict(list)
    for one in found.arrivals:
        ends[one.session].append(one.at)
    open_s = sum(max(ats) - min(ats) for ats in ends.values())
    assert open_s / (5 * 3_600) == pytest.approx(10.0, rel=0.1)
    assert found.times == "rule"
    other = read([path], rules=Rules(sessions="drawn", open_sessions=10.0, hours=5.0, seed=4))
    assert [one.at for one in found.arrivals] != [one.at for one in other.arrivals]


def test_local_ids_are_the_sessions_own(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"".join(text(weka(1, id=f"s{n}", scope="local")) for n in range(2)))
    first, second = (
        {block for one in read([path]).arrivals if one.session == name for block in one.blocks}
        for name in ("s0", "s1")
    )
    assert first
    assert not first & second
