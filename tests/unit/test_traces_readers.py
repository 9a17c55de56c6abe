"""What each reader makes of its format, against plain countings of the same files."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from preheat.errors import TraceError
from preheat.traces import turns
from preheat.traces.arrival import UNKNOWN, Arrival, Trace
from preheat.traces.keys import Keys
from preheat.traces.mooncake import batch_s, spread
from preheat.traces.reading import read
from preheat.traces.rules import Rules
from trace_examples import EXAMPLES, mooncake, openai, sharegpt, taubench, text, weka


def saved(tmp_path: Path, name: str, *lines: Any) -> Path:
    path = tmp_path / name
    path.write_bytes(b"".join(one if isinstance(one, bytes) else text(one) for one in lines))
    return path


def infinite_hits(prompts: list[tuple[int, ...]]) -> tuple[int, int, int]:
    """Accesses, distinct ids and prefix hits with a cache that keeps everything."""
    seen: set[int] = set()
    hits = 0
    for ids in prompts:
        for one in ids:
            if one not in seen:
                break
            hits += 1
        seen.update(ids)
    return sum(map(len, prompts)), len(seen), hits


def prompts_of(trace: Trace) -> list[tuple[int, ...]]:
    return [one.blocks for one in trace.arrivals]


# Mooncake


@pytest.mark.parametrize("part", ["conversation", "synthetic"])
def test_mooncakes_infinite_hits_are_those_of_a_plain_count(part: str, shared_data: Path) -> None:
    path = shared_data / "mooncake" / f"{part}.part1.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"this trace isn't here ({path})")
    with gzip.open(path, "rt") as file:
        plain = [tuple(json.loads(line)["hash_ids"]) for line in file]
    assert infinite_hits(prompts_of(read([path]))) == infinite_hits(plain)


def test_the_conversations_batches_are_spread_and_the_synthetic_ones_are_not(
    shared_data: Path,
) -> None:
    folder = shared_data / "mooncake"
    if not folder.is_dir():
        pytest.skip(f"these traces aren't here ({folder})")
    conversation = read([folder / "conversation.part1.jsonl.gz"])
    ats = [one.at for one in conversation.arrivals]
    assert len(set(ats)) == len(ats)
    assert max(after - before for before, after in pairwise(ats)) < 6
    assert "every 3 s" in conversation.rules[0]
    assert read([folder / "synthetic.part1.jsonl.gz"]).rules == ()
    plain = read([folder / "conversation.part1.jsonl.gz"], rules=Rules(batch_spread=False))
    assert plain.rules == ()
    assert len({one.at for one in plain.arrivals}) < len(ats) / 5


def test_batches_are_told_by_their_step_and_their_company() -> None:
    batched = [3.0 * (place // 4) for place in range(80)]
    assert batch_s(batched) == 3.0
    assert batch_s([3.0 * place for place in range(80)]) == 0.0  # a clock, but nobody in company
    assert batch_s([place**1.5 for place in range(80)]) == 0.0
    assert batch_s([1.0, 1.0]) == 0.0
    assert batch_s([]) == 0.0


def test_a_batch_is_spread_no_further_than_one_step() -> None:
    assert spread([0.0, 0.0, 9.0, 9.0, 9.0], 3.0) == [0.0, 1.5, 9.0, 10.0, 11.0]


def test_equal_requests_have_equal_keys(tmp_path: Path) -> None:
    one, same, longer = (
        mooncake(3),
        mooncake(3, timestamp=400),
        mooncake(3, timestamp=500, output_length=99),
    )
    keys = [one.key for one in read([saved(tmp_path, "t.jsonl", one, same, longer)]).arrivals]
    assert keys == [0, 0, 1]


# Weka


def naive_groups(request: dict[str, Any], block_tokens: int) -> list[tuple[int, ...]]:
    """Every full group as the ids of its prompt up to its end."""
    ids = tuple(id_ for first, count in request["runs"] for id_ in range(first, first + count))
    step = block_tokens // 64
    return [ids[:end] for end in range(step, len(ids) + 1, step)]


@pytest.mark.parametrize("block_tokens", [64, 256, 1024])
def test_groups_of_weka_are_those_of_a_plain_count(block_tokens: int, tmp_path: Path) -> None:
    made = [
        weka(
            1,
            requests=[
                {**request, "in": 64 * sum(count for _, count in runs) + rest, "runs": runs}
                for request, runs, rest in (
                    (weka(1)["requests"][0], [[1, 30]], 0),
                    (weka(1)["requests"][0], [[1, 15], [16, 15], [99, 7]], 5),
                    (weka(1)["requests"][0], [[1, 20], [500, 40]], 0),
                    (weka(1)["requests"][0], [[1, 30], [99, 9]], 63),
                    (weka(1)["requests"][0], [[7, 1]], 1),
                )
            ],
        )
    ]
    trace = read([saved(tmp_path, "s.jsonl", *made)], rules=Rules(block_tokens=block_tokens))
    name_of: dict[tuple[int, ...], int] = {}
    for one, request in zip(trace.arrivals, made[0]["requests"], strict=True):
        groups = naive_groups(request, block_tokens)
        full = one.blocks[: one.input_tokens // block_tokens]
        assert len(full) == len(groups)
        assert len(one.blocks) == -(-one.input_tokens // block_tokens)
        for block, group in zip(full, groups, strict=True):
            assert name_of.setdefault(group, block) == block
    assert len(set(name_of.values())) == len(name_of)


def test_recorded_groups_have_the_hits_of_a_plain_count(shared_data: Path) -> None:
    """Each full group of 40 sessions, named by its ids and all before; and v6 as a whole."""
    path = shared_data / "weka_agentic" / "v6_global.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"this trace isn't here ({path})")
    trace = read([path])
    full = {one.id: one.blocks[: one.input_tokens // 1024] for one in trace.arrivals}
    number_of: dict[tuple[int, tuple[int, ...]], int] = {}
    plain: dict[str, tuple[int, ...]] = {}
    with gzip.open(path, "rt", newline="\n") as file:
        for line in list(file)[:40]:
            session = json.loads(line)
            for turn, request in enumerate(session["requests"]):
                ids = [i for first, count in request["runs"] for i in range(first, first + count)]
                chain, names = -1, []
                for start in range(0, len(ids) // 16 * 16, 16):
                    chain = number_of.setdefault(
                        (chain, tuple(ids[start : start + 16])), len(number_of)
                    )
                    names.append(chain)
                plain[f"{session['id']}/{turn}"] = tuple(names)
    ours_of: dict[int, int] = {}
    for name, groups in plain.items():
        assert len(full[name]) == len(groups)
        for theirs, ours in zip(groups, full[name], strict=True):
            assert ours_of.setdefault(theirs, ours) == ours
    assert len(set(ours_of.values())) == len(ours_of)
    # The study of the whole set (445 sessions, of which these are two thirds) counted 95.8 %.
    accesses, _, hits = infinite_hits([*full.values()])
    assert hits / accesses == pytest.approx(0.957, abs=0.003)


def test_local_sessions_have_the_hits_that_were_counted(shared_data: Path) -> None:
    path = shared_data / "weka_agentic" / "v8_local.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"this trace isn't here ({path})")
    full = [one.blocks[: one.input_tokens // 1024] for one in read([path]).arrivals]
    accesses, _, hits = infinite_hits(full)
    assert hits / accesses == pytest.approx(0.960, abs=0.002)  # of the whole set


def test_a_weka_request_keeps_what_the_trace_says(tmp_path: Path) -> None:
    trace = read([saved(tmp_path, "s.jsonl", weka(1))])
    second = trace.arrivals[1]
    assert second.at - trace.arrivals[0].at == pytest.approx(10.0)
    assert (second.session, second.turn, second.model, second.kind, second.stop) == (
        *("s1", 1, "m", "text"),
        "end_turn",
    )
    assert (second.think_s, second.service_s, second.ttft_s) == (1.0, 2.0, UNKNOWN)
    assert not second.ends_session
    assert "begins once" in trace.rules[1]


# Texts


def test_texts_share_blocks_up_to_where_they_differ(tmp_path: Path) -> None:
    rounds = [
        sharegpt(0, user=1, round=0, input="a" * 2_000),
        sharegpt(0, user=1, round=1, input="a" * 2_000 + "b" * 600),
        sharegpt(0, user=2, round=0, input="a" * 1_500 + "c" * 900),
    ]
    trace = read([saved(tmp_path, "r.jsonl", *rounds)])
    by_id = {one.id: one for one in trace.arrivals}
    first, second, third = by_id["1/0"], by_id["1/1"], by_id["2/0"]
    assert (first.input_tokens, second.input_tokens, trace.block_tokens) == (500, 650, 128)
    assert [len(one.blocks) for one in (first, second, third)] == [4, 6, 5]
    assert first.blocks[:3] == second.blocks[:3]
    assert first.blocks[:2] == third.blocks[:2]
    assert not set(first.blocks[2:]) & set(third.blocks[2:])
    assert second.at - first.at == 15.0
    assert (first.think_s, second.think_s) == (UNKNOWN, 15.0)


def test_a_trajectorys_requests_are_its_agents_messages(tmp_path: Path) -> None:
    trace = read([saved(tmp_path, "t.jsonl", taubench(1), taubench(2))], rules=Rules(turn_s=5.0))
    first, second = (one for one in trace.arrivals if one.session == "1-0")
    assert (first.kind, first.stop, second.kind, second.stop) == (
        *("user", "tool_calls"),
        *("tool", "stop"),
    )
    assert second.at - first.at == pytest.approx(5.0)
    whole = (first.input_tokens // 128) - 1
    assert first.blocks[:whole] == second.blocks[:whole]
    other = next(one for one in trace.arrivals if one.session == "2-0")
    assert first.blocks[0] == other.blocks[0]


# Rates


def test_servegen_draws_as_many_as_were_measured_within_their_lengths(tmp_path: Path) -> None:
    rates = ["t_s,client,rate_rps,cv,pattern,arg1,arg2"]
    rates += [f"{600 * n},0,{0.5 + n % 2},3,Weibull,0.45,1" for n in range(60)]
    tokens = [
        "t_s,client,in_p10,in_p25,in_p50,in_p75,in_p90,in_p95,in_p99,"
        "out_p10,out_p25,out_p50,out_p75,out_p90,out_p95,out_p99",
        "0,0,10,20,30,40,50,60,70,1,2,3,4,5,6,7",
    ]
    saved(tmp_path, "m.rate.csv", "\n".join(rates).encode())
    saved(tmp_path, "m.tokens.csv", "\n".join(tokens).encode())
    trace = read([tmp_path], rules=Rules(seed=5))
    assert len(trace.arrivals) == pytest.approx(36_000, rel=0.05)
    windows = Counter(int(one.at // 600) % 2 for one in trace.arrivals)
    assert windows[1] / windows[0] == pytest.approx(3.0, rel=0.15)
    inputs = sorted(one.input_tokens for one in trace.arrivals)
    assert (inputs[0], inputs[len(inputs) // 2], inputs[-1]) == (10, 30, 70)
    gaps = [after.at - before.at for before, after in pairwise(trace.arrivals)]
    mean = sum(gaps) / len(gaps)
    spread_of_gaps = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean
    assert 2.0 < spread_of_gaps < 4.0  # 2.4 is a Weibull's of that shape; the rate doubles besides
    half = read([tmp_path], rules=Rules(seed=5, rate_scale=0.5, clients=("0",)))
    assert len(half.arrivals) == pytest.approx(18_000, rel=0.05)


def test_shapes_that_give_no_mean_or_no_intervals_end_in_no_loop(tmp_path: Path) -> None:
    head = b"t_s,client,rate_rps,cv,pattern,arg1\n"
    path = saved(tmp_path, "m.rate.csv", head, b"0,0,1,1,Weibull,0.001\n0,1,1,1,Gamma,1\n")
    trace = read([path])
    assert trace.skipped == 1
    assert "arg1" in trace.bad[0].why
    path = saved(tmp_path, "n.rate.csv", head, b"0,0,1,1,Weibull,0.01\n")
    with pytest.raises(TraceError, match="fewer days or clients"):
        read([path], rules=Rules(most_requests=10_000))


def test_rates_that_give_too_many_are_refused_before_they_are_drawn(tmp_path: Path) -> None:
    path = saved(
        tmp_path, "m.rate.csv", b"t_s,client,rate_rps,cv,pattern,arg1\n0,0,99999999,1,Gamma,1\n"
    )
    with pytest.raises(TraceError, match="fewer days or clients"):
        read([path])
    many = [f"0,{client},1000,1,Gamma,1" for client in range(20)]
    path.write_text("\n".join(["t_s,client,rate_rps,cv,pattern,arg1", *many]))
    drawn: list[int] = []
    with pytest.raises(TraceError, match="these rates give 12,000,000 requests"):
        read([path], progress=lambda file, count: None if file else drawn.append(count))
    assert drawn == []


def test_lengths_without_rates_are_told_to_need_them(tmp_path: Path) -> None:
    ends = [f"{end}_p{share}" for end in ("in", "out") for share in (10, 25, 50, 75, 90, 95, 99)]
    header = ",".join(("t_s", "client", *ends))
    path = saved(tmp_path, "m.tokens.csv", f"{header}\n0,0{',5' * 14}\n".encode())
    with pytest.raises(TraceError, match=r"m: lengths only, .* give the rate file, too"):
        read([path])


def test_how_many_requests_were_drawn_is_told_as_they_are(tmp_path: Path) -> None:
    rates = saved(
        tmp_path, "m.rate.csv", b"t_s,client,rate_rps,cv,pattern,arg1\n0,0,50,1,Gamma,1\n"
    )
    days = saved(tmp_path, "days.csv", b"day,requests,total_tokens\n0,30000,600000\n")
    sessions = saved(tmp_path, "sessions.jsonl", *(weka(number) for number in range(9)))
    drawn = Rules(sessions="drawn", open_sessions=9)
    for path, rules in ((rates, Rules()), (days, Rules()), (sessions, drawn)):
        told: list[tuple[str, int]] = []
        trace = read([path], rules=rules, progress=lambda *what, told=told: told.append(what))
        counts = [count for file, count in told if not file]
        assert len(counts) == len(trace.arrivals) // 4_096 > 1
        assert counts == sorted(counts)
        assert counts[-1] <= len(trace.arrivals)


def test_a_trace_with_its_own_times_draws_no_sessions_and_says_so(tmp_path: Path) -> None:
    drawn = Rules(sessions="drawn")
    plain = saved(tmp_path, "trace.jsonl", *(mooncake(number) for number in range(9)))
    assert any("No session is drawn" in rule for rule in read(plain, rules=drawn).rules)
    assert not any("No session is drawn" in rule for rule in read(plain).rules)
    sessions = saved(tmp_path, "sessions.jsonl", *(weka(number) for number in range(9)))
    assert not any("No session is drawn" in rule for rule in read(sessions, rules=drawn).rules)


def test_burstgpts_minutes_keep_their_tokens(tmp_path: Path) -> None:
    rows = [(0, 100.0), (1, 0.0), (2, 0.5), (1440, 700.0)]
    path = saved(
        tmp_path,
        "w.csv",
        b"minute,total_tokens_per_s\n",
        *(b"%d,%f\n" % row for row in rows),
    )
    trace = read([path])
    tokens: Counter[int] = Counter()
    requests: Counter[int] = Counter()
    for one in trace.arrivals:
        tokens[int(one.at // 60)] += one.input_tokens + one.output_tokens
        requests[int(one.at // 60)] += 1
    assert set(tokens) == {0, 2, 1440}
    for minute, per_s in rows:
        assert tokens[minute] == pytest.approx(60 * per_s, abs=requests[minute])
    days = saved(tmp_path, "d.csv", b"day,requests,total_tokens\n0,70,1000\n1,9,90000\n")
    assert Counter(int(one.at // 86_400) for one in read([days]).arrivals) == {0: 70, 1: 9}
    idle = saved(tmp_path, "h.csv", b"hour,mean_requests_per_hour\n0,0\n1,0\n")
    trace = read([days, idle])  # hours in which nothing came say nothing
    assert len(trace.arrivals) == 79
    assert "drawn evenly from it" in trace.rules[0]
    together = read([path, days])
    assert sum(one.at >= 86_400 for one in together.arrivals) == pytest.approx(4, abs=6)


def test_burstgpts_single_requests_are_as_recorded(tmp_path: Path) -> None:
    path = saved(
        tmp_path,
        "BurstGPT_1.csv",
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
        b"5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n",
    )
    trace = read([path])
    assert (trace.times, trace.rules) == ("measured", ())
    second = trace.arrivals[1]
    assert (second.at, second.model, second.input_tokens, second.output_tokens, second.kind) == (
        *(45.0, "GPT-4", 1087, 230),
        "API log",
    )


def test_bings_queries_come_by_popularity(tmp_path: Path) -> None:
    path = saved(
        tmp_path,
        "q.tsv",
        b"Date\tQuery\tIsImplicitIntent\tCountry\tPopularityScore\n",
        b"2020-01-02\tflu\tTrue\tPeru\t7\n2020-01-03\tflu\tTrue\tPeru\t2\n",
        b"2020-01-02\tmask\tTrue\tPeru\t1\n",
    )
    assert Counter(one.key for one in read([path]).arrivals) == {0: 9, 1: 1}
    assert Counter(one.key for one in read([path], rules=Rules(rate_scale=0.5)).arrivals) == {
        0: 5,
        1: 1,
    }


# Key streams


def test_arc_accesses_are_runs(tmp_path: Path) -> None:
    trace = read([saved(tmp_path, "o.lis", b"10 3 0 1\n11 1 0 2\n5 1 0 3\n")])
    assert [one.key for one in trace.arrivals] == [0, 1, 2, 1, 3]
    assert trace.times == "order"


def test_a_key_streams_columns_and_arrivals_agree(tmp_path: Path) -> None:
    trace = read([saved(tmp_path, "a.tr", b"1 9 10\n1 8 20\n4 9 10\n")])
    keys = trace.arrivals
    assert isinstance(keys, Keys)
    assert (list(keys.keys), list(keys.sizes_bytes or ()), list(keys.ats or ())) == (
        *([0, 1, 0], [10, 20, 10]),
        [1.0, 1.0, 4.0],
    )
    assert keys[-1] == Arrival(at=4.0, id="2", key=0, size_bytes=10)
    assert [one.key for one in keys[1:]] == [1, 0]
    with pytest.raises(IndexError):
        keys[3]


def test_large_keys_are_big_endian(tmp_path: Path) -> None:
    path = tmp_path / "cache2k__x.trace"
    path.write_bytes(bytes([0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 255, 255, 255, 255]))
    assert [one.key for one in read([path]).arrivals] == [0, 1, 0, 2]


# Rules


@pytest.mark.parametrize(
    "wrong",
    [
        {"span_s": 0.0},
        {"open_sessions": -1.0},
        {"hours": float("inf")},
        {"rate_scale": float("nan")},
        {"input_share": 1.5},
        {"block_tokens": 100},
        {"block_tokens": 0},
        {"trunk_sessions": 0},
        {"most_requests": 0},
        {"sessions": "twice"},
        {"days": -1.0},
    ],
)
def test_an_impossible_rule_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=next(iter(wrong))):
        Rules(**wrong)


def test_turns_know_how_long_a_client_waited() -> None:
    told = turns.Turns()
    assert told.next("a", 1.0, 2.0) == (0, UNKNOWN)
    assert told.next("b", 2.0, 2.0) == (0, UNKNOWN)
    assert told.next("a", 7.0, 2.0) == (1, 4.0)
    assert told.next("a", 8.0, UNKNOWN) == (2, UNKNOWN)  # before the answer
    assert told.next("a", 99.0, 1.0) == (3, UNKNOWN)  # nobody says how long that took
    assert told.next("", 100.0, 1.0) == (0, UNKNOWN)


# Without the extra


def test_all_but_parquet_and_zstd_need_no_extra(tmp_path: Path) -> None:
    plain = saved(tmp_path, "t.jsonl", *(mooncake(n) for n in range(5)))
    log = tmp_path / "log.parquet"
    log.write_bytes(b"PAR1" + bytes(99))
    packed = tmp_path / "x.zst"
    packed.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(99))
    code = f"""
import sys
sys.modules["numpy"] = sys.modules["pyarrow"] = None
from preheat.traces.reading import read
print(len(read([{str(plain)!r}]).arrivals))
for path in ({str(log)!r}, {str(packed)!r}):
    try:
        read([path])
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, of_log, of_packed = done.stdout.splitlines()
    assert count == "5"
    assert of_log.startswith("TraceError")
    assert "pip install 'preheat[log]'" in of_log
    assert of_packed.startswith("TraceError")
    assert "pip install 'preheat[log]'" in of_packed


def test_text_is_not_kept(tmp_path: Path) -> None:
    for name in ("openai", "lmcache", "sharegpt", "taubench"):
        path = tmp_path / EXAMPLES[name].name
        path.write_bytes(EXAMPLES[name].data)
        assert "secret" not in repr(read([path]))
    assert "secret" in repr(openai(1))


def test_a_mooncake_block_has_one_block_before_it(tmp_path: Path) -> None:
    """Else ids name less than all before them, and no hit would be one."""
    ids = [[0, 1, 2, 3], [0, 1, 4, 5], [6, 1, 7, 8], [1, 0, 9, 10], [0, 1, 4, 11]]
    lines = [mooncake(3, hash_ids=one, timestamp=at) for at, one in enumerate(ids)]
    trace = read(saved(tmp_path, "t.jsonl", *lines))
    assert [one.blocks for one in trace.arrivals] == [tuple(ids[place]) for place in (0, 1, 4)]
    assert [bad.line for bad in trace.bad] == [3, 4]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (
            "azure.csv",
            f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,{10**400},1\n",
        ),
        ("minutes.csv", "minute,total_tokens_per_s\n1,1e308\n"),
        ("minutes.csv", f"minute,total_tokens_per_s\n{10**400},1\n"),
        ("bing.tsv", "Date\tQuery\tCountry\tPopularityScore\n2020-01-01\tq\tc\t101\n"),
        ("lmcache.jsonl", '{"timestamp": 1e300, "input": "", "output": "", "session_id": ""}\n'),
    ],
)
def test_a_number_that_nothing_can_have_is_a_bad_line(name: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"bad lines: .*:[12]: "):
        read(saved(tmp_path, name, data.encode()))


def test_queries_beyond_most_requests_are_refused_before_they_are_drawn(tmp_path: Path) -> None:
    rows = b"Date\tQuery\tCountry\tPopularityScore\n2020-01-01\tq\tc\t90\n"
    with pytest.raises(TraceError, match="most_requests"):
        read(saved(tmp_path, "bing.tsv", rows), rules=Rules(rate_scale=1e12))


def test_a_number_of_thousands_of_digits_is_a_bad_line(tmp_path: Path) -> None:
    """Python refuses to make a number of it, whatever the format it is tried as."""
    long = b"1" * 5_000
    trace = read([saved(tmp_path, "a.lis", b"1\n2\n", long, b"\n1\n")])
    assert (trace.format, len(trace.arrivals), trace.skipped) == ("lirs", 3, 1)
    with pytest.raises(TraceError, match="no known format"):
        read([saved(tmp_path, "b.tr", long, b" 2 3\n")])
