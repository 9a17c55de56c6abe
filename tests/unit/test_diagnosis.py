"""What the doctor makes of what it saw: pure parts, without a server."""

import json
import random
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines_faked import as_events
from preheat.core.kv_events import Batch, Stored
from preheat.engines.dialects.readings import Capacity
from preheat.errors import ConfigError
from preheat.lab.diagnosis import events, wording
from preheat.lab.diagnosis.ear import Block, form_of
from preheat.lab.diagnosis.facts import Facts, Sight, sight_in
from preheat.lab.diagnosis.log import examine_log, read_log
from preheat.lab.diagnosis.partings import head_of, kind_at, partings
from preheat.lab.diagnosis.sights import balance_of
from preheat.lab.diagnosis.summary import verdict
from preheat.lab.diagnosis.verdicts import Reuse, judge
from preheat.lab.doctor.finding import Finding

# how much of a repeated prompt was cached


def reuse(*series: list[int | None], **more: Any) -> Reuse:
    usual: dict[str, Any] = {"kind": "vllm", "prompt_tokens": 1_300, "block_tokens": 16}
    return Reuse(about="http://a", series=series, **{**usual, **more})


HIT, MISS = [0, 1_248, 1_248], [0, 0, 0, 0, 0]
UNTOLD: list[int | None] = [None] * 5
MIXED: list[int | None] = [0, 1_248, 0, 1_248, 0]


@pytest.mark.parametrize(
    ("seen", "check", "severity"),
    [
        (reuse(HIT), "reuse", "ok"),
        (reuse([None, 1_248, 1_248]), "reuse", "ok"),
        (reuse([0, 784, 784], block_tokens=784), "reuse", "ok"),
        (reuse([0, 700, 700]), "reuse-in-part", "warning"),
        (reuse([1_248, 1_248, 1_248]), "cached-tokens-wrong", "warning"),
        (reuse(MISS, caches=False), "prefix-cache-off", "problem"),
        (reuse(MISS), "prefix-cache-off", "problem"),
        (reuse(MISS, caches=True), "no-reuse", "problem"),
        (reuse(MISS, caches=True, added_tokens=9), "prompt-changed", "problem"),
        (reuse(MISS, kind="llamacpp", forced=1_290), "cache-prompt-off", "problem"),
        (reuse(MISS, caches=True, identical=1_248), "beginning-lost", "problem"),
        (reuse(UNTOLD, caches=True, identical=1_248), "beginning-lost", "problem"),
        (reuse([0, 320, 320]), "reuse-in-part", "warning"),
        (reuse(MISS, balance="several"), "several-servers", "problem"),
        (reuse(MISS, capacity_tokens=512), "capacity", "problem"),
        (reuse(UNTOLD, caches=False), "prefix-cache-off", "problem"),
        (reuse(UNTOLD, counted=4_992), "cached-tokens-hidden", "problem"),
        (reuse(UNTOLD, counted=0), "prefix-cache-off", "problem"),
        (reuse(UNTOLD, counted=0, caches=True), "no-reuse", "problem"),
        (reuse(UNTOLD, kind="sglang", native=1_299), "cached-tokens-hidden", "problem"),
        (reuse(UNTOLD, cold_s=0.9, warm_s=0.1), "cached-tokens-hidden", "problem"),
        (reuse(UNTOLD, kind="tgi", cold_s=0.9, warm_s=0.1), "cached-tokens-hidden", "note"),
        (reuse(UNTOLD, cold_s=0.9, warm_s=0.8), "cached-tokens-unknown", "unknown"),
        (reuse(UNTOLD, balance="several"), "several-servers", "problem"),
        (reuse(MIXED, MIXED, balance="several"), "several-servers", "problem"),
        (reuse(MIXED, MIXED), "several-servers", "problem"),
        (reuse(MIXED, MIXED, balance="one"), "cache-reset", "problem"),
        (reuse(MIXED, HIT, balance="one"), "cache-reset", "warning"),
        (reuse(MIXED, HIT, balance="restarted"), "cache-reset", "warning"),
        (reuse([0, 0, 0], prompt_tokens=20, block_tokens=128), "probe-short", "unknown"),
        (reuse([0, 0, 0], prompt_tokens=900, least_tokens=1_024), "probe-short", "unknown"),
    ],
)
def test_each_cause_has_its_finding(seen: Reuse, check: str, severity: str) -> None:
    found = judge(seen)
    assert (found.check, found.severity) == (check, severity)
    assert bool(found.do) == (severity != "ok")
    assert found.asked


# who answers at an address


def sights(*pairs: tuple[float | None, int | None]) -> list[Sight]:
    return [Sight(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (sights((1, 0), (1, 0)), sights((1, 900), (1, 900)), "one"),
        (sights((1, 0), (2, 0), (1, 0)), sights((2, 900)), "several"),
        (sights((1, 0), (2, 0), (3, 0)), sights((4, 0)), "several"),
        (sights((1, 500), (1, 500)), sights((2, 10), (2, 10)), "restarted"),
        (sights((None, 500), (None, 80), (None, 500)), sights((None, 80)), "several"),
        (sights((None, 500)), sights((None, 20)), "restarted"),
        (sights((None, 500)), sights((None, 500)), "several"),
        (sights((1, None)), sights((1, None)), "unknown"),
        ([], [], "unknown"),
    ],
)
def test_pages_tell_one_server_from_several(
    before: list[Sight], after: list[Sight], expected: str
) -> None:
    assert balance_of(before, after) == expected


def test_a_page_says_who_gave_it() -> None:
    page = b'process_start_time_seconds 1.7e9\nvllm:prompt_tokens_total{engine="0"} 7\n'
    assert sight_in(page) == Sight(1.7e9, 7)
    assert sight_in(b"<html>") == Sight(None, None)


# where prompts part

TAIL = "You answer questions about ships. " * 30


def chat(system: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi."}],
        **more,
    }


@pytest.mark.parametrize(
    ("first", "second", "kind", "at"),
    [
        ("Today is 2026-11-29. ", "Today is 2026-11-30. ", "a date", 17),
        ("Today is November 29, 2026. ", "Today is November 30, 2026. ", "a date", 18),
        ("It is Monday. ", "It is Friday. ", "a date", 6),
        ("Now: 2026-11-30T10:00:01Z. ", "Now: 2026-11-30T10:00:02Z. ", "a date with a time", 23),
        ("Now: 10:15. ", "Now: 10:16. ", "a time of day", 9),
        ("At 1796079166. ", "At 1796079167. ", "a time stamp", 12),
        ("Request 41 of today. ", "Request 42 of today. ", "a number", 9),
        ("For Anna. ", "For Zoe. ", "a word or a name", 4),
        ("Trace 9f86d081884c7d65. ", "Trace 60303ae22b998861. ", "a hexadecimal id", 6),
        ("Key sk_live_4eC39Hq2. ", "Key sk_live_9zZ81Xx7. ", "an id", 12),
    ],
)
def test_the_kind_of_text_at_which_prompts_part_is_named(
    first: str, second: str, kind: str, at: int
) -> None:
    heads = [head_of(chat(text + TAIL)) for text in (first, second, second)]
    (found,) = partings(heads)
    assert (found.kind, found.at, found.place) == (kind, at, "message 1 (system)")
    assert (found.prompts, found.forms) == (3, 2)
    assert found.behind >= len(TAIL)


def test_an_id_of_its_own_in_each_prompt_is_one_family() -> None:
    draw = random.Random(5)
    ids = [uuid.UUID(int=draw.getrandbits(128)) for _ in range(50)]
    (found,) = partings([head_of(chat(f"Session {one}. {TAIL}")) for one in ids])
    assert found.prompts == found.forms == 50
    assert found.kind == "a UUID"


def test_prompts_that_differ_in_what_they_are_about_do_not_part() -> None:
    other = "You write poems about the sea and the stars, in rhymes of four lines each. " * 10
    heads = [head_of(chat(TAIL)), head_of(chat(TAIL)), head_of(chat(other)), head_of(chat("Hi 1"))]
    assert partings([*heads, head_of(chat("Hi 2"))]) == []


def test_tools_in_another_order_are_found() -> None:
    tools = [
        {"type": "function", "function": {"name": f"t{n}", "description": "x" * 200}}
        for n in range(3)
    ]
    turned = [{"function": one["function"], "type": "function"} for one in tools]
    for other in (tools[::-1], turned):
        (found,) = partings([head_of(chat(TAIL, tools=tools)), head_of(chat(TAIL, tools=other))])
        assert (found.kind, found.place) == ("the same in another order", "the tools")


def test_a_changing_value_behind_the_tools_has_its_own_place() -> None:
    tools = [{"type": "function", "function": {"name": "t", "description": "x" * 300}}]
    heads = [head_of(chat(f"Day {n}. {TAIL}", tools=tools)) for n in (1, 2)]
    (found,) = partings(heads)
    assert (found.place, found.at) == ("message 1 (system)", 4)
    assert found.before > 300


def test_other_apis_have_beginnings_too() -> None:
    places = [
        head_of(body).places[0][0]
        for body in (
            {"prompt": TAIL},
            {"system": [{"type": "text", "text": TAIL}], "messages": []},
            {"instructions": TAIL, "input": "Hi"},
            {"input": TAIL},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        )
    ]
    assert places == [
        "the prompt", "`system`", "`instructions`", "the prompt", "message 1 (user)",
    ]  # fmt: skip
    assert head_of({"messages": [None, 5], "tools": "x"}).places == ()


def test_a_place_behind_the_end_is_its_end() -> None:
    assert kind_at("abc", 3) == "its end"
    assert kind_at("a(b", 1) == "other signs"


# a log


def log_of(tmp_path: Path, *bodies: dict[str, Any]) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"request": body}) + "\n" for body in bodies))
    return path


def checks(path: Path, facts: Facts | None = None, kind: str = "vllm") -> dict[str, Finding]:
    found = examine_log(path.name, *read_log(path), facts, kind)
    return {one.check: one for one in found}


def test_a_log_that_is_well_has_nothing_to_remark(tmp_path: Path) -> None:
    path = log_of(tmp_path, *(chat(TAIL, model="m", cache_salt="t") for _ in range(20)))
    facts = Facts(models=("m",), block_tokens=16, capacity=Capacity(tokens=50_000))
    assert {one.severity for one in checks(path, facts).values()} == {"ok"}


def test_no_text_of_a_log_is_told(tmp_path: Path) -> None:
    secret = "Xylophone"
    path = log_of(
        tmp_path, *(chat(f"{secret} {n} {TAIL}", cache_salt=f"{secret}{n}") for n in range(9))
    )
    found = checks(path)
    assert {"prompt-parts"} <= set(found)
    assert "Xyl" not in repr(found)
    assert "ships" not in repr(found)


def test_a_salt_and_a_cache_key_for_each_request_are_found(tmp_path: Path) -> None:
    path = log_of(
        tmp_path, *(chat(TAIL, cache_salt=f"s{n}", prompt_cache_key=f"k{n}") for n in range(8))
    )
    found = checks(path)
    assert found["salt-each"].severity == "problem"
    assert "8 values" in found["salt-each"].found
    assert found["cache-key-each"].severity == "warning"
    path = log_of(tmp_path, *(chat(TAIL, cache_salt=f"tenant{n % 2}") for n in range(8)))
    assert "salt-each" not in checks(path)


def test_what_shuts_prompts_out_is_found(tmp_path: Path) -> None:
    path = log_of(tmp_path, *(chat(TAIL, model=f"m{n % 3}", cache_prompt=False) for n in range(6)))
    found = checks(path, Facts(models=("m0", "m1")))
    assert found["cache-prompt-false"].severity == "problem"
    assert "up to 3 names" in found["model-names"].found
    assert "2 of 6 requests ask for 1 names" in found["adapter-unknown"].found


def test_prompts_under_a_block_and_over_the_capacity_are_found(tmp_path: Path) -> None:
    path = log_of(tmp_path, *(chat("Hi.", model="m") for _ in range(4)), chat(TAIL * 9, model="m"))
    facts = Facts(models=("m",), block_tokens=128, capacity=Capacity(tokens=1_024))
    found = checks(path, facts)
    assert "4 of 5 prompts have fewer than 129 tokens" in found["prompt-short"].found
    assert "1 of 5 prompts are longer than the 1024 tokens" in found["prompt-long"].found


def test_more_beginnings_than_fit_are_found(tmp_path: Path) -> None:
    names = ("alpha", "beta", "gamma", "delta")
    path = log_of(
        tmp_path, *(chat(f"{name} " * 200, model="m") for name in names for _ in range(3))
    )
    facts = Facts(
        models=("m",), block_tokens=1, capacity=Capacity(tokens=600, slots=2, slot_tokens=4_096)
    )
    found = checks(path, facts, "llamacpp")
    assert found["capacity-small"].severity == "warning"
    assert found["slots-few"].severity == "warning"
    facts.has_host_cache = False
    assert checks(path, facts, "llamacpp")["slots-few"].severity == "problem"
    facts.has_host_cache = True
    assert "slots-few" not in checks(path, facts, "llamacpp")


def test_a_log_without_prompts_and_one_that_is_not_there_are_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'\xff\n{"a": 1}\n' + b"[" * 5_000 + b'\n{"request": {"messages": 5}}\n')
    found = checks(path)
    assert found["log-unreadable"].severity == "problem"
    assert "none of its 4 lines" in found["log-unreadable"].found
    with pytest.raises(ConfigError, match="--log"):
        read_log(tmp_path / "absent.jsonl")


# events


def stored(seed: int) -> Batch:
    return Batch(1.0, [Stored([seed, seed + 1], None, list(range(32)), 16)])


@pytest.mark.parametrize(
    ("is_map", "is_bytes", "expected"),
    [
        (True, True, "maps, with hashes as bytes"),
        (True, False, "maps, with hashes as integers"),
        (False, True, "arrays, with hashes as bytes"),
        (False, False, "arrays, with hashes as integers"),
    ],
)
def test_the_form_of_events_is_named(is_map: bool, is_bytes: bool, expected: str) -> None:
    assert form_of(as_events(stored(7), is_map=is_map, is_bytes=is_bytes)) == expected


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode([1.0, [[], {}, 5]])]
)
def test_what_is_no_event_has_no_form(payload: bytes) -> None:
    assert form_of(payload) == ""


def told(seed: int, algorithm: str = "sha256", size: int = 16, form: str = "maps") -> events.Told:
    blocks = [
        Block(seed * 100 + at, tuple(range(at * size, (at + 1) * size)), (), "") for at in range(2)
    ]
    return events.Told("vllm", algorithm, blocks, size, form)


def test_hashes_of_equal_blocks_are_compared() -> None:
    assert [one.check for one in events.compare({"a": told(1), "b": told(1)})] == ["hashes"]
    (seed,) = events.compare({"a": told(1), "b": told(2)})
    assert (seed.check, seed.severity) == ("hash-seed", "warning")
    assert "PYTHONHASHSEED" in seed.do
    (algorithm,) = events.compare({"a": told(1), "b": told(2, "xxhash")})
    assert algorithm.check == "hash-algorithm"
    assert "--prefix-caching-hash-algo" in algorithm.do
    assert events.compare({"a": told(1), "b": told(2, size=32)}) == []
    (form, _) = events.compare({"a": told(1), "b": told(1, form="arrays")})
    assert form.check == "event-format"
    assert events.compare({"a": told(1)}) == []


# templates and tokens


def test_a_template_that_writes_a_date_or_moves_turns_is_found() -> None:
    fine = wording.Wording(shorter="<s>a", longer="<s>ab", rendered="<s>a")
    assert [one.check for one in wording.template_findings("a", fine)] == ["template"]
    for dated in ("Today Date: 30 Nov 2026", "on 2026-11-30,", "Nov 30, 2026"):
        (found,) = wording.template_findings("a", wording.Wording(rendered=dated))
        assert found.check == "template-date"
    clock = wording.Wording(source="{{ strftime_now('%d') }}", shorter=[1], longer=[1, 2])
    assert wording.template_findings("a", clock)[0].check == "template-date"
    moved = wording.Wording(shorter=[1, 2, 3], longer=[1, 9, 2, 3])
    (found,) = wording.template_findings("a", moved)
    assert found.check == "template-turns"
    assert "token 1 of 3" in found.found
    assert wording.template_findings("a", wording.Wording())[0].severity == "unknown"


def test_tokenizers_and_templates_are_compared() -> None:
    def severities(*pair: wording.Wording) -> dict[str, str]:
        found = wording.compare(dict(zip("ab", pair, strict=True)))
        return {one.check: one.severity for one in found}

    same = wording.Wording(sample=[1], rendered="x")
    assert severities(same, same) == {"tokenizer": "ok", "templates": "ok"}
    other = wording.Wording(sample=[2], rendered="x")
    assert severities(same, other) == {"tokenizer-differs": "problem", "templates": "ok"}
    other = wording.Wording(sample=[1], rendered="y")
    assert severities(same, other) == {"tokenizer": "ok", "template-differs": "problem"}
    assert set(severities(same, wording.Wording()).values()) == {"unknown"}
    assert wording.compare({"a": same}) == []


# the verdict


def test_the_verdict_is_the_best_explanation() -> None:
    parts = Finding("prompt-parts", "log", "problem", "they part", "", "move it")
    off = Finding("prefix-cache-off", "http://a", "problem", "it is off", "", "turn it on")
    down = Finding("refused", "http://b", "problem", "refused", "", "start it")
    slow = Finding("metrics-off", "http://a", "warning", "none", "", "--metrics")
    fine = Finding("reuse", "http://a", "ok", "cached")
    unsure = Finding("cached-tokens-unknown", "http://a", "unknown", "who knows")
    assert verdict([parts, slow, off]) == (
        "http://a: it is off. (1 more problem below)\nturn it on"
    )
    assert verdict([off, down]).startswith("http://b: refused.")
    assert verdict([fine, slow]) == "It works, but: http://a: none.\n--metrics"
    assert verdict([fine]).startswith("Nothing is wrong")
    assert verdict([unsure]) == "Nothing wrong was found; 1 thing can't be known."
