"""Logs of OpenAI's API, in the shapes that LiteLLM, Helicone and vLLM users have."""

import json
from pathlib import Path
from typing import Any

import pytest

from preheat.core.costs import ServiceModel
from preheat.core.prefix import LeafLru, PrefixStore
from preheat.errors import TraceError
from preheat.replay.pool import serve
from preheat.traces.arrival import UNKNOWN, Trace
from preheat.traces.reading import read
from trace_examples import openai, text

SAID = [{"role": "system", "content": "be brief " * 200}, {"role": "user", "content": "why?"}]
ANSWER = {
    "id": "chatcmpl-1",
    "created": 1_767_323_045,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "so"}}],
    "usage": {"prompt_tokens": 460, "completion_tokens": 2, "total_tokens": 462},
}


def litellm(**changed: Any) -> dict[str, Any]:
    """A StandardLoggingPayload, as docs.litellm.ai specifies it."""
    return {
        "id": "chatcmpl-1",
        "trace_id": "session-7",
        "call_type": "acompletion",
        "stream": True,
        "status": "success",
        "total_tokens": 462,
        "prompt_tokens": 460,
        "completion_tokens": 2,
        "startTime": 1_767_323_044.5,
        "endTime": 1_767_323_046.5,
        "completionStartTime": 1_767_323_045.0,
        "model": "gpt-4o",
        "model_group": "gpt-4o",
        "metadata": {"user_api_key_hash": "88dc", "user_api_key_alias": None},
        "cache_hit": None,
        "messages": SAID,
        "response": ANSWER,
        "model_parameters": {"temperature": 0, "stream": True},
        **changed,
    }


def spend(**changed: Any) -> dict[str, Any]:
    """A row of LiteLLM_SpendLogs: times are words, and JSON may be inside strings."""
    return {
        "request_id": "chatcmpl-1",
        "call_type": "acompletion",
        "api_key": "88dc",
        "spend": 0.01,
        "prompt_tokens": 460,
        "completion_tokens": 2,
        "startTime": "2026-01-02T03:04:04.500000",
        "endTime": "2026-01-02T03:04:06.500000+00:00",
        "completionStartTime": "2026-01-02T03:04:06.500000+00:00",
        "model": "gpt-4o",
        "model_group": "gpt-4o",
        "session_id": "session-7",
        "metadata": "{}",
        "messages": json.dumps(SAID),
        "response": json.dumps(ANSWER),
        "proxy_server_request": "{}",
        **changed,
    }


def helicone(**changed: Any) -> dict[str, Any]:
    """A HeliconeRequest, as its export writes it with bodies."""
    return {
        "response_id": "r",
        "response_created_at": "2026-01-02T03:04:06Z",
        "response_body": ANSWER,
        "response_status": 200,
        "response_model": "gpt-4o-2024",
        "request_id": "q",
        "request_created_at": "2026-01-02T03:04:04.500Z",
        "request_body": {"model": "gpt-4o", "messages": SAID, "temperature": 0},
        "request_path": "https://oai.helicone.ai/v1/chat/completions",
        "request_user_id": "u",
        "request_properties": {"Helicone-Session-Id": "session-7"},
        "request_model": "gpt-4o",
        "provider": "OPENAI",
        "delay_ms": 2000,
        "time_to_first_token": 500,
        "prompt_tokens": 460,
        "completion_tokens": 2,
        **changed,
    }


def batch(number: int, **changed: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [*SAID, {"role": "user", "content": str(number)}]}
    url = "/v1/chat/completions"
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body, **changed}


def batch_answer(number: int, **changed: Any) -> dict[str, Any]:
    body = {**ANSWER, "created": 1_767_323_045 + number}
    response = {"status_code": 200, "request_id": "x", "body": body}
    return {"id": f"b{number}", "custom_id": f"c{number}", "response": response, **changed}


def found(tmp_path: Path, *lines: dict[str, Any], name: str = "log.jsonl") -> Trace:
    path = tmp_path / name
    path.write_bytes(b"".join(map(text, lines)))
    return read([path])


@pytest.mark.parametrize(
    ("line", "ttft_s", "tenant"),
    [
        (litellm(), 0.5, "88dc"),
        ({"standard_logging_object": litellm()}, 0.5, "88dc"),
        (spend(), UNKNOWN, "88dc"),
        (helicone(), 0.5, ""),
    ],
)
def test_one_exchange_is_told_alike_by_all(
    line: dict[str, Any], ttft_s: float, tenant: str, tmp_path: Path
) -> None:
    trace = found(tmp_path, line)
    (one,) = trace.arrivals
    assert (trace.format, trace.skipped, one.at) == ("openai", 0, 0.0)
    assert (one.model, one.session, one.tenant, one.stop) == (
        *("gpt-4o", "session-7", tenant),
        "stop",
    )
    assert (one.input_tokens, one.output_tokens) == (460, 2)
    assert (one.ttft_s, one.service_s) == (ttft_s, 2.0)
    assert one.kind == "/v1/chat/completions"
    assert len(one.blocks) == 4  # 1,872 bytes of JSON
    assert one.key == 0


def test_prompts_are_the_same_however_they_were_logged(tmp_path: Path) -> None:
    trace = found(
        *(tmp_path, litellm(), spend(), helicone()),
        openai(1, request={"messages": SAID, "model": "gpt-4o", "temperature": 0}),
    )
    full = {one.blocks[:3] for one in trace.arrivals}
    assert len(full) == 1


def test_keys_are_the_gateways(tmp_path: Path) -> None:
    """Equal but for what can't change an answer; sampled where the API would sample."""
    bodies = [
        {"model": "m", "messages": SAID, "temperature": 0},
        {"messages": SAID, "stream": True, "temperature": 0.0, "user": "u", "model": "m"},
        {"model": "m", "messages": SAID, "temperature": 0, "max_tokens": 9},
        {"model": "m", "messages": SAID},
        {"model": "other", "messages": SAID, "temperature": 0},
    ]
    trace = found(tmp_path, *(openai(n, request=body) for n, body in enumerate(bodies)))
    keys = [one.key for one in trace.arrivals]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    assert [one.sampled for one in trace.arrivals] == [False, False, False, True, False]
    blocks = [one.blocks[:3] for one in trace.arrivals]
    assert blocks[0] == blocks[1] == blocks[2] == blocks[3] != blocks[4]


def test_a_longer_conversation_extends_a_shorter_one(tmp_path: Path) -> None:
    more = [*SAID, {"role": "assistant", "content": "so"}, {"role": "user", "content": "x" * 900}]
    trace = found(
        *(tmp_path, openai(1, request={"model": "m", "messages": SAID})),
        openai(2, request={"model": "m", "messages": more}),
    )
    first, second = trace.arrivals
    assert first.blocks[:3] == second.blocks[:3]
    assert len(second.blocks) > len(first.blocks)


def test_a_batch_is_two_files(tmp_path: Path) -> None:
    asked, answered = tmp_path / "input.jsonl", tmp_path / "output.jsonl"
    asked.write_bytes(b"".join(text(batch(number)) for number in range(3)))
    answered.write_bytes(b"".join(text(batch_answer(number)) for number in (2, 0, 1, 7)))
    trace = read([asked, answered])
    assert [one.id for one in trace.arrivals] == ["c0", "c1", "c2"]
    assert [one.at for one in trace.arrivals] == [0.0, 1.0, 2.0]
    assert {one.output_tokens for one in trace.arrivals} == {2}
    assert [(bad.path, bad.line) for bad in trace.bad] == [(str(answered), 4)]
    alone = read([asked])
    assert (alone.times, [one.at for one in alone.arrivals]) == ("order", [0.0, 1.0, 2.0])
    with pytest.raises(TraceError, match="give the batch's input too"):
        read([answered])


def test_bare_bodies_and_load_traces_are_read(tmp_path: Path) -> None:
    bare = found(tmp_path, {"model": "m", "messages": SAID}, {"model": "m", "messages": SAID})
    assert (bare.times, [one.key for one in bare.arrivals]) == ("order", [0, 0])
    load = found(
        *(tmp_path, {"at": 0.5, "body": {"model": "m", "prompt": "x" * 600}}),
        {"at": 4.0, "messages": SAID, "model": "m"},
    )
    assert [one.at for one in load.arrivals] == [0.0, 3.5]
    assert [one.kind for one in load.arrivals] == ["/v1/completions", "/v1/chat/completions"]


def test_what_was_redacted_has_no_blocks_and_no_key(tmp_path: Path) -> None:
    hidden = [{"role": "user", "content": "redacted-by-litellm"}]
    trace = found(tmp_path, litellm(messages=hidden), helicone(request_body={}))
    for one in trace.arrivals:
        assert (one.blocks, one.key, one.input_tokens) == ((), UNKNOWN, 460)
    assert trace.block_tokens == 0
    assert "None of 2 rows has a prompt" in trace.rules[-1]


def bare_spend(number: int) -> dict[str, Any]:
    """A row of LiteLLM_SpendLogs as LiteLLM writes it unless it is told to store prompts."""
    start = f"2026-01-02T03:04:{number:02}Z"
    return spend(
        messages={},
        response={},
        proxy_server_request={},
        startTime=start,
        endTime=start,
        prompt_tokens=4_000 + number,
    )


def test_spend_logs_without_prompts_say_nothing_of_a_cache(tmp_path: Path) -> None:
    rows = [bare_spend(number) for number in range(8)]
    del rows[3]["proxy_server_request"]
    trace = found(tmp_path, *rows)
    assert (trace.format, trace.skipped, trace.block_tokens) == ("openai", 0, 0)
    assert [one.input_tokens for one in trace.arrivals] == [4_000 + number for number in range(8)]
    (rule,) = trace.rules
    assert rule.startswith("None of 8 rows has a prompt (LiteLLM: store_prompts_in_spend_logs")


def test_rows_without_prompts_share_nothing_with_those_that_have_them(tmp_path: Path) -> None:
    rows = [bare_spend(number) if number % 3 else spend() for number in range(6)]
    trace = found(tmp_path, *rows)
    assert "4 of 6 rows have no prompt: they share nothing." in trace.rules
    assert sorted(len(one.blocks) for one in trace.arrivals) == [0, 0, 0, 0, 4, 4]
    served = serve(
        trace.arrivals, trace.block_tokens, ServiceModel(), PrefixStore(10**6, LeafLru())
    )
    full = 460 // trace.block_tokens
    assert sorted(one.cached for one in served) == [0, 0, 0, 0, 0, full]
    assert all(one.prefill_s == one.no_cache_s for one in served if not one.cached)
    assert sorted(one.full for one in served)[2:] == [
        (4_000 + number) // trace.block_tokens for number in (1, 2, 4, 5)
    ]


def test_a_row_without_a_prompt_is_written_without_one(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from preheat.traces.writing import write

    trace = found(tmp_path, spend(), bare_spend(9))
    write(trace, tmp_path / "trace.parquet")
    again = read([tmp_path / "trace.parquet"])
    assert [len(one.blocks) for one in again.arrivals] == [4, 0]


@pytest.mark.parametrize(
    ("usage", "rule"),
    [
        ({"prompt_tokens": 460}, "(from the rows whose usage is known; the others"),
        ({}, "512 bytes of prompt are 128 tokens here (4 bytes each: no row says its usage)."),
    ],
)
def test_what_a_block_is_in_tokens_is_told(
    usage: dict[str, int], rule: str, tmp_path: Path
) -> None:
    line = openai(1, request={"model": "m", "messages": SAID}, response={"usage": usage})
    trace = found(tmp_path, line)
    assert f"512 bytes of prompt are {trace.block_tokens} tokens here" in trace.rules[0]
    assert rule in trace.rules[0]


def test_texts_that_litellm_cut_are_told(tmp_path: Path) -> None:
    long = "a" * 700 + "... (litellm_truncated 12982 chars)" + "b" * 1300
    trace = found(tmp_path, spend(messages=[{"role": "user", "content": long}]), spend())
    assert any("cut texts of 1 prompts" in rule for rule in trace.rules)
    assert not any("cut" in rule for rule in found(tmp_path, spend()).rules)


def test_failures_are_arrivals_too(tmp_path: Path) -> None:
    trace = found(
        *(tmp_path, litellm(status="failure", response=None, completion_tokens=0)),
        helicone(response_status=503, response_body=None),
    )
    assert [one.stop for one in trace.arrivals] == ["failure", "status-503"]


def test_tokens_nobody_counted_are_made_of_bytes(tmp_path: Path) -> None:
    """As many to a byte as the prompts have whose tokens are known."""
    counted = openai(1, request={"model": "m", "messages": SAID}, response=ANSWER)
    uncounted = openai(2, request={"model": "m", "messages": SAID}, response={})
    trace = found(tmp_path, counted, uncounted)
    first, second = trace.arrivals
    assert first.input_tokens == second.input_tokens == 460
    assert second.output_tokens == UNKNOWN
    size = len(json.dumps(SAID)) - 1
    assert trace.block_tokens == round(512 * 460 / size)


def test_a_session_has_turns_and_pauses(tmp_path: Path) -> None:
    lines = [openai(number, session="s", duration_ms=500) for number in (0, 10, 30)]
    trace = found(tmp_path, *lines)
    assert [one.turn for one in trace.arrivals] == [0, 1, 2]
    assert [one.think_s for one in trace.arrivals] == [UNKNOWN, 9.5, 19.5]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1_700_000_000, 0.0),
        (1_700_000_000.25, 0.25),
        (1_700_000_000_250, 0.25),
        (1_700_000_000_250_000, 0.25),
        ("2023-11-14T22:13:20.25Z", 0.25),
        ("2023-11-14 22:13:20.25", 0.25),
        ("2023-11-14T23:13:20.25+01:00", 0.25),
    ],
)
def test_times_in_any_unit(value: Any, seconds: float, tmp_path: Path) -> None:
    trace = found(tmp_path, openai(1, timestamp="2023-11-14T22:13:20Z"), openai(2, timestamp=value))
    assert trace.arrivals[1].at == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    "odd",
    [
        {"response": {"choices": [{"message": "no object"}]}},
        {"response": {"choices": [{"message": ["no", "object"], "text": 7}]}},
        {"response": {"choices": ["no object"]}},
        {"response": {"choices": {"no": "list"}}},
        {"response": {"choices": [{"message": {"content": {"no": "text"}}}]}},
        {"response": {"usage": {"prompt_tokens": "12", "completion_tokens": True}}},
    ],
)
def test_an_answer_of_an_odd_shape_is_an_answer_nothing_is_known_of(
    odd: dict[str, Any], tmp_path: Path
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    trace = found(tmp_path, {"at": 1, "request": body, **odd})
    assert (trace.skipped, trace.arrivals[0].output_tokens) == (0, -1)


@pytest.mark.parametrize(
    "field",
    [
        '"timestamp": 1e300',
        f'"timestamp": {10**400}',
        f'"timestamp": 1, "duration_s": {10**400}',
        '"timestamp": 1, "latency_ms": 1e300',
        '"timestamp": 1, "response": {"usage": {"prompt_tokens": 1e300}}',
        f'"timestamp": 1, "response": {{"usage": {{"completion_tokens": {10**400}}}}}',
    ],
)
def test_numbers_that_nothing_can_have_are_bad_lines(field: str, tmp_path: Path) -> None:
    good = '{"timestamp": 2, "request": {"model": "m", "messages": []}}'
    bad = f'{{{field}, "request": {{"model": "m", "messages": []}}}}'
    path = tmp_path / "log.jsonl"
    path.write_text(f"{good}\n{bad}\n")
    trace = read(path)
    assert len(trace.arrivals) == trace.skipped == 1
    assert trace.bad[0].line == 2


def test_of_a_plain_line_only_the_request_must_be_there(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    trace = found(tmp_path, {"request": body}, {"request": body})
    assert (trace.format, trace.times, len(trace.arrivals)) == ("openai", "order", 2)
