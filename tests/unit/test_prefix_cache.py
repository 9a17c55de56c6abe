"""What the witnesses of a prefix cache say together."""

from typing import Any

import pytest

from preheat.lab.doctor.prefix_cache import (
    HIT,
    QUERIED,
    Seen,
    counters_in,
    grown,
    judge,
    timings_of,
    told_by,
)

NOTHING: dict[str, Any] = {
    "kind": "", "input_tokens": 1_300, "told": None, "timings": None,
    "queried": None, "hit": None, "cold_s": 0.02, "warm_s": 0.02,
}  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "check", "severity"),
    [
        ({"told": 1_296}, "cached-tokens", "ok"),
        ({"told": 0}, "prefix-cache-off", "warning"),
        ({"told": 16}, "prefix-cache-off", "warning"),
        ({"told": 0, "hit": 1_296.0}, "prefix-cache-off", "warning"),
        ({"timings": 1_290}, "cached-tokens-hidden", "warning"),
        ({"timings": 0}, "prefix-cache-off", "warning"),
        ({"queried": 1_300.0, "hit": 1_296.0}, "cached-tokens-hidden", "warning"),
        ({"queried": 1_300.0, "hit": 0.0}, "prefix-cache-off", "warning"),
        ({"queried": 1_300.0, "hit": 0.0, "cold_s": 2.0}, "prefix-cache-off", "warning"),
        ({"hit": 1_296.0}, "cached-tokens-hidden", "warning"),
        ({"cold_s": 2.0, "warm_s": 0.2}, "cached-tokens-hidden", "warning"),
        ({"cold_s": 2.0, "warm_s": 0.2, "kind": "tgi"}, "cached-tokens-hidden", "note"),
        ({"cold_s": 0.004, "warm_s": 0.001}, "cached-tokens-unknown", "warning"),
        ({}, "cached-tokens-unknown", "warning"),
    ],
)
def test_hidden_and_off_are_told_apart_where_that_is_possible(
    seen: dict[str, Any], check: str, severity: str
) -> None:
    finding = judge("engines.a", Seen(**(NOTHING | seen)))
    assert (finding.check, finding.severity) == (check, severity)
    assert finding.severity == "ok" or (finding.why and finding.do)


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("vllm", "--enable-prompt-tokens-details"),
        ("sglang", "--enable-cache-report"),
        ("llamacpp", "update llama.cpp"),
        ("tgi", "no way"),
        ("", "vLLM tells it with --enable-prompt-tokens-details"),
    ],
)
def test_the_flag_that_shows_them_is_that_of_the_engine(kind: str, flag: str) -> None:
    assert flag in judge("a", Seen(**(NOTHING | {"kind": kind, "hit": 1_296.0}))).do


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("vllm", "--no-enable-prefix-caching"),
        ("sglang", "--disable-radix-cache"),
        ("llamacpp", "--no-cache-prompt"),
        ("tgi", "PREFIX_CACHING"),
        ("", "several servers stand behind this address"),
    ],
)
def test_the_flag_that_turns_it_on_is_that_of_the_engine(kind: str, flag: str) -> None:
    assert flag in judge("a", Seen(**(NOTHING | {"kind": kind, "told": 0}))).do


def test_counters_are_summed_over_their_labels() -> None:
    page = (
        b"# HELP vllm:prefix_cache_hits_total x\n# TYPE vllm:prefix_cache_hits_total counter\n"
        b'vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 5.0\n'
        b'vllm:prefix_cache_hits_total{engine="1"} 1e1\r\n'
        b"vllm:prefix_cache_queries_total 40\nother_total 7\nvllm:prefix_cache_hits_created 9\n"
        b"sglang:cached_tokens_total{} 1.7.3\n\xff\n"
        b"sglang:cached_tokens_total 1e999\n"
    )
    assert counters_in(page) == {"vllm:prefix_cache_hits": 15.0, "vllm:prefix_cache_queries": 40.0}


def test_a_counter_that_was_not_there_before_began_at_zero() -> None:
    after = {"sglang:cached_tokens": 7.0}
    assert grown(HIT, {}, after) == 7.0
    assert grown(HIT, {"sglang:cached_tokens": 5.0}, after) == 2.0
    assert grown(QUERIED, {}, after) is None


@pytest.mark.parametrize("usage", [None, 3, {}, {"prompt_tokens_details": None}, {
    "prompt_tokens_details": {"cached_tokens": None}}, {"prompt_tokens_details": {"cached_tokens": True}},
    {"prompt_tokens_details": {"cached_tokens": 10**400}, "cache_n": 10**400}, {"cache_n": -1}])  # fmt: skip
def test_what_is_no_count_is_not_told(usage: Any) -> None:
    assert told_by({"usage": usage}) is None
    assert timings_of({"timings": usage}) is None


def test_counts_are_told() -> None:
    assert told_by({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}) == 0
    assert timings_of({"timings": {"cache_n": 12}}) == 12
