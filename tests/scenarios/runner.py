"""Plays the scenarios of response_cache.jsonl against a real gateway before a fake engine.

A scenario is one JSON object. Its language:

    base            the request body for `path` (chat completions unless it says else); without
                    one, a greedy question
    steps           sent in order; each a JSON merge patch on `base` (null removes), with `as` (an
                    API key), `hdr` (headers), `wait_s`, and what is expected: `cache` (hit, miss,
                    bypass), `status`, `content`, `finish`, `ctype`, `expect` (see `STEP_CHECKS`)
    up, up_sse      what the engine answers, in order; then "A1", "A2", …, one a call, so that a
                    wrong hit shows as a repeated number. "echo" repeats the question
    cfg, price, hook, admin     settings, see `SETTINGS` and `settings_of`
    repeat, parallel, template, variants, parallel_posts, load     other ways to send

Whatever it says that isn't understood here is an error when it is read: no expectation is passed
over in silence. Beside what a scenario expects, every play asserts that the engine's status
is kept, each body is valid for its protocol, no exception's text shows in a body or in the log,
and the engine was called once for each miss and bypass.
"""

import contextlib
import json
import re
import socket
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec
from stage import HERE, Play, Setup, Stage
from volley import volley

from comparison import Comparison
from harness import Reply, chat
from openai_shapes import CHAT, choices_of, finish_of, is_stream, text_of, usage_of

T = TypeVar("T")
Words = Iterator[tuple[str, Iterable[str], Collection[str]]]


class UnreadableError(Exception):
    """The scenario says something that this runner can't check."""


# What a scenario says ------------------------------------------------------------------------


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a scenario: what it doesn't list is refused."""


class Up(_Said, frozen=True, kw_only=True):
    """One answer of the engine's."""

    content: str | None = None
    finish_reason: str = "stop"
    tool_calls: list[dict[str, Any]] = []
    status: int = 200
    body: Any = None
    connect_error: bool = False

    def __post_init__(self) -> None:
        is_failure = self.connect_error or self.status != 200
        if is_failure is (self.content is not None or bool(self.tool_calls)):
            raise ValueError("an answer either says something or fails")
        if self.body is not None and self.status == 200:
            raise ValueError("only a failure has a body of its own")

    def as_reply(self) -> dict[str, Any]:
        """The same in the fake engine's words."""
        if self.connect_error:
            return {"fault": "connect_error"}
        if self.status != 200:
            return {"status": self.status, "body": self.body or {"error": {"message": "scripted"}}}
        return {
            "content": self.content,
            "finish_reason": self.finish_reason,
            "tool_calls": self.tool_calls,
        }


class Admin(_Said, frozen=True, kw_only=True):
    route_alias: dict[str, str]


class Step(_Said, frozen=True, kw_only=True):
    cache: str
    patch: dict[str, Any] = {}
    status: int = 200
    hdr: dict[str, str] = {}
    key: str = msgspec.field(default="", name="as")
    wait_s: float = 0.0
    save: str = ""
    content: str | None = None
    finish: str | None = None
    ctype: str | None = None
    admin: Admin | None = None
    expect: dict[str, Any] = {}


class _Scenario(_Said, frozen=True, kw_only=True):
    id: str
    path: str = CHAT
    cfg: dict[str, Any] = {}

    def words(self) -> Words:
        """Where, which words, and those that are understood there."""
        yield "cfg", self.cfg, SETTINGS

    def script(self, play: Play) -> None:
        """What the engine answers."""
        play.script([])


class Price(_Said, frozen=True, kw_only=True):
    input: float = msgspec.field(name="in")
    output: float = msgspec.field(name="out")


class Steps(_Scenario, frozen=True, kw_only=True):
    """One request after the other."""

    steps: list[Step]
    base: dict[str, Any] = {}
    hdr: dict[str, str] = {}
    up: list[Up] = []
    up_sse: list[Any] = []
    price: dict[str, Price] = {}
    hook: str = ""
    fault: str = ""
    digest: str = ""
    also: list[str] | str = []

    def words(self) -> Words:
        yield from super().words()
        for step in self.steps:
            yield "expect", step.expect, STEP_CHECKS
            yield "cache", step.cache.split("-or-"), ("hit", "hit (L1)", "miss", "bypass")
        yield "fault", [self.fault], ("", "redis refuses connections")
        yield "hook", [self.hook], ["force_digest" if self.digest else ""]
        yield "also", self._also, ALSO

    @property
    def _also(self) -> list[str]:
        return [self.also] if isinstance(self.also, str) else self.also

    def script(self, play: Play) -> None:
        replies = [one.as_reply() for one in self.up]
        play.script(replies, default={"sse": self.up_sse} if self.up_sse else "count")

    def play(self, play: Play) -> None:
        for step in self.steps:
            _take_step(play, self, step)
        for sentence in self._also:
            ALSO[sentence](play, self)


class RawSteps(_Scenario, frozen=True, kw_only=True):
    """Bodies as bytes, each with what the cache shall say."""

    raw_steps: list[str]
    cache: list[str]

    def play(self, play: Play) -> None:
        for body, cache in zip(self.raw_steps, self.cache, strict=True):
            assert play.ask(self.path, body.encode()).cache == cache


class Repeats(_Scenario, frozen=True, kw_only=True):
    """The same request again and again."""

    base: dict[str, Any]
    repeat: int
    expect: dict[str, Any]
    across_processes: bool = False
    with_header: dict[str, str] = {}
    expect_with_header: dict[str, Any] = {}

    def words(self) -> Words:
        yield from super().words()
        yield "expect", self.expect, ROUND_CHECKS
        yield (
            "with_header",
            self.with_header,
            () if self.across_processes else ("X-Cache-Variants",),
        )
        yield "expect_with_header", self.expect_with_header, ROUND_CHECKS

    def play(self, play: Play) -> None:
        self._round(play, {}, self.expect)
        if self.with_header:
            self._round(play, _our_headers(self.with_header), self.expect_with_header)

    def _round(self, play: Play, headers: Mapping[str, str], expect: dict[str, Any]) -> None:
        calls, position = play.calls, len(play.fake.bodies)
        if self.across_processes:
            replies = play.ask_from_processes(self.path, self.base, self.repeat)
        else:
            replies = [play.ask(self.path, self.base, headers) for _ in range(self.repeat)]
        round_ = Round(self, replies, play.calls - calls, play.fake.bodies[position:])
        for name, value in expect.items():
            ROUND_CHECKS[name](round_, value)


class Storm(_Scenario, frozen=True, kw_only=True):
    """Many different requests at once, each of them twice, as a stream and not."""

    parallel: int
    template: dict[str, Any]
    up: Literal["echo"]
    expect: dict[str, Any]

    def script(self, play: Play) -> None:
        play.script([], default=self.up)

    def words(self) -> Words:
        yield from super().words()
        yield "expect", self.expect, STORM_CHECKS

    def play(self, play: Play) -> None:
        bodies = [_filled(self.template, i) for i in range(self.parallel)]
        twice = [body | {"stream": is_second} for body in bodies for is_second in (False, True)]
        replies = play.ask_at_once([(self.path, body) for body in twice])
        for name, value in self.expect.items():
            STORM_CHECKS[name](twice, replies, value)


class Variant(_Said, frozen=True, kw_only=True):
    expect: dict[str, Any]
    leader_disconnects_after_ms: int = 0
    up: list[Up] = []


class Stampede(_Scenario, frozen=True, kw_only=True):
    """Equal requests at once."""

    base: dict[str, Any]
    parallel: int
    up_delay_ms: int
    variants: list[Variant]

    def words(self) -> Words:
        yield from super().words()
        for variant in self.variants:
            yield "expect", variant.expect, STAMPEDE_CHECKS

    def play(self, play: Play) -> None:
        for number, variant in enumerate(self.variants):
            play.script([one.as_reply() for one in variant.up], delay_s=self.up_delay_ms / 1_000)
            body = self.base | {"seed": number}  # a question that no variant before has answered
            calls = play.calls
            patience_s = variant.leader_disconnects_after_ms / 1_000
            with play.leaving(self.path, body, patience_s) as leavers:
                replies = play.ask_at_once([(self.path, body)] * (self.parallel - leavers))
            for name, value in variant.expect.items():
                STAMPEDE_CHECKS[name](replies, play.calls - calls, value)


class Post(_Said, frozen=True, kw_only=True):
    path: str
    body: dict[str, Any]


class Posts(_Scenario, frozen=True, kw_only=True):
    """Different requests at once."""

    parallel_posts: list[Post]
    up: Literal["echo"]
    expect: dict[str, Any]

    def script(self, play: Play) -> None:
        play.script([], default=self.up)

    def words(self) -> Words:
        yield from super().words()
        yield "expect", self.expect, POSTS_CHECKS

    def play(self, play: Play) -> None:
        calls = play.calls
        replies = play.ask_at_once([(post.path, post.body) for post in self.parallel_posts])
        for name, value in self.expect.items():
            POSTS_CHECKS[name](replies, play.calls - calls, value)


class Single(_Scenario, frozen=True, kw_only=True):
    """One request that goes through as it is; it is sent twice, to see that nothing was stored."""

    body: dict[str, Any]
    expect: dict[str, Any]

    def words(self) -> Words:
        yield from super().words()
        yield "expect", self.expect, SINGLE_CHECKS

    def play(self, play: Play) -> None:
        position = len(play.fake.bodies)
        replies = [play.ask(self.path, _with_tokens(self.body)) for _ in range(2)]
        for name, value in self.expect.items():
            SINGLE_CHECKS[name](self, replies, play.fake.bodies[position:], value)


class Amount(_Said, frozen=True, kw_only=True):
    distinct_prompts: int
    answer_bytes: int


class Load(_Scenario, frozen=True, kw_only=True):
    """So many different requests that the cache overflows."""

    load: Amount
    expect: dict[str, Any]

    def words(self) -> Words:
        yield from super().words()
        yield "expect", self.expect, LOAD_CHECKS

    def script(self, play: Play) -> None:
        play.script([], default={"content": "x" * self.load.answer_bytes})

    def play(self, play: Play) -> None:
        before_bytes = play.gateway_rss_bytes
        counts = volley(
            play.gateway.port, self.path, map(_prompt, range(self.load.distinct_prompts))
        )
        assert counts == {(200, "miss"): self.load.distinct_prompts}
        play.expect_calls(self.load.distinct_prompts)
        for name, value in self.expect.items():
            LOAD_CHECKS[name](play, self, before_bytes, value)


class Hang(_Scenario, frozen=True, kw_only=True):
    """Something that the gateway depends on accepts connections and says nothing."""

    base: dict[str, Any]
    fault: str
    expect: dict[str, Any]

    def words(self) -> Words:
        yield from super().words()
        # There is no embedder yet: see LATER_IN_PART in test_response_cache.py.
        yield "fault", [self.fault], ("tcp accept, no reply (redis; then embedder)",)
        yield "expect", self.expect, HANG_CHECKS

    def play(self, play: Play) -> None:
        assert play.ask(self.path, self.base).status == self.expect["status"]
        calls = play.calls
        with play.beside(Setup(l2='kind = "off"')) as plain:
            with Comparison(play.gateway, plain, clients=0) as comparison:
                before_s = comparison.added_s(20)
                assert not play.gateway.stats["l2"]["up"]
                after_s = comparison.added_s(60)
            assert comparison.failures == []
        play.expect_calls(play.calls - calls)
        for name, value in self.expect.items():
            HANG_CHECKS[name](before_s, after_s, value)


Scenario = Steps | RawSteps | Repeats | Storm | Stampede | Posts | Single | Load | Hang
_KIND_OF_FIELD: Final[Mapping[str, type[Any]]] = {
    "steps": Steps,
    "raw_steps": RawSteps,
    "repeat": Repeats,
    "template": Storm,
    "variants": Stampede,
    "parallel_posts": Posts,
    "body": Single,
    "load": Load,
}


def read(line: str | Mapping[str, Any]) -> Scenario:
    """The scenario. Raises UnreadableError for whatever the runner doesn't understand."""
    said = json.loads(line) if isinstance(line, str) else line
    kinds = [kind for field, kind in _KIND_OF_FIELD.items() if field in said]
    if not kinds and "fault" in said:
        kinds = [Hang]
    if len(kinds) != 1:
        raise UnreadableError(f"it is to be sent in {len(kinds)} ways: {sorted(said)}")
    try:
        scenario: Scenario = msgspec.convert(said, kinds[0])
    except msgspec.ValidationError as error:
        raise UnreadableError(str(error)) from None
    for where, words, understood in scenario.words():
        unknown = [word for word in words if word not in understood]
        if unknown:
            raise UnreadableError(f"{where}: {unknown}")
    return scenario


def _our_headers(said: Mapping[str, str]) -> dict[str, str]:
    """Variants are a namespace's setting here, not a header: see `settings_of`."""
    return {"X-Preheat-Namespace": f"variants-{said['X-Cache-Variants']}"} if said else {}


def _filled(template: Any, i: int) -> Any:
    return json.loads(json.dumps(template).replace("{i}", str(i)))


def _with_tokens(template: Any) -> Any:
    """ "<2000 tokens fixed>" becomes so many words."""
    return json.loads(
        re.sub(r"<(\d+) tokens fixed>", lambda m: "word " * int(m[1]), json.dumps(template))
    )


def _prompt(number: int) -> bytes:
    message = {"role": "user", "content": f"Prompt {number}"}
    return json.dumps({"model": "m1", "temperature": 0, "messages": [message]}).encode()


def merged(base: Any, patch: Any) -> Any:
    """RFC 7396: an object is merged, a null removes, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(base) if isinstance(base, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


# What it asks of the gateway -----------------------------------------------------------------


SETTINGS: Final[Mapping[str, Callable[[Any], str]]] = {
    "ttl_s": lambda value: f"exact.ttl_s = {value}",
    "cache_sampled": lambda value: f'exact.sampled = "{"reuse" if value else "bypass"}"',
    "fallback_message": lambda value: f"engines.fallback_message = {json.dumps(value)}",
    "l1_max_bytes": lambda value: f"l1.bytes = {value}",
    "l1_max_entries": lambda value: f"l1.entries = {value}",
    "auto_breakpoints": lambda value: f"engines.upstream.auto_breakpoints = {str(value).lower()}",
}


def settings_of(scenario: Scenario) -> Setup:
    """What the scenario asks of the gateway, in our words."""
    lines = [SETTINGS[name](value) for name, value in scenario.cfg.items()]
    environment = {}
    launcher, l2 = Setup().launcher, ""
    if getattr(scenario, "fault", ""):
        lines.append('exact.secret_env = "KEY_SECRET"')
        environment["KEY_SECRET"] = "a secret that gateways on one Redis share"
    if isinstance(scenario, Repeats) and scenario.across_processes:
        lines.append("listen.workers = 2")
        l2 = 'path = "{kept}"'
    if isinstance(scenario, Repeats):
        for name, count in scenario.with_header.items():
            namespace = _our_headers({name: count})["X-Preheat-Namespace"]
            lines += [f"[namespaces.{namespace}]", f'sampled = "variants({count})"']
    if isinstance(scenario, Steps):
        for model, prices in scenario.price.items():
            lines += [f"[models.{model}]", f"input = {prices.input}", f"output = {prices.output}"]
        for key in dict.fromkeys(step.key for step in scenario.steps if step.key):
            variable = f"KEY_{key.replace('-', '_').upper()}"
            lines += [f"[tenants.{key}]", f'api_key_env = "{variable}"']
            environment[variable] = key
        if scenario.hook:
            launcher = (str(HERE / "colliding_keys.py"),)
    return Setup("\n".join(lines), l2, tuple(environment.items()), launcher)


def play(scenario: Scenario, stage: Stage) -> None:
    """Play it. Raises AssertionError where something isn't as expected."""
    setup = settings_of(scenario)
    with _odd_redis(scenario) as url:
        if url:
            setup = msgspec.structs.replace(setup, l2=f'kind = "redis"\nurl = "{url}"')
        with stage.playing(setup) as under_way:
            scenario.script(under_way)
            scenario.play(under_way)


@contextlib.contextmanager
def _odd_redis(scenario: Scenario) -> Iterator[str]:
    """The address of a Redis with the scenario's fault; empty where it needs none."""
    fault = getattr(scenario, "fault", "")
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))  # whose port nobody else takes, and which refuses
        if isinstance(scenario, Hang):
            there.listen(128)  # the kernel accepts, and nobody answers
        yield f"redis://127.0.0.1:{there.getsockname()[1]}/0" if fault else ""


# One step ------------------------------------------------------------------------------------


class Seen(msgspec.Struct, frozen=True):
    """A step's answer, and what it is compared with."""

    reply: Reply
    first: Reply
    saved: Mapping[str, Reply]
    ledger_before: dict[str, Any]
    ledger: dict[str, Any]

    def rise(self, account: str) -> int:
        """By how much the step has raised a sum of the ledger."""
        assert self.ledger["residual"] == 0
        return int(self.ledger[account] - self.ledger_before[account])

    def saved_field(self, name: str) -> Any:
        label, _, field = name.partition(".")
        return _body(self.saved[label])[field]


def _take_step(play: Play, scenario: Steps, step: Step) -> None:
    if step.admin is not None:
        lines = [
            f'[models.{name}]\nalias = "{alias}"' for name, alias in step.admin.route_alias.items()
        ]
        play.restart(Setup("\n".join(lines)))
    time.sleep(step.wait_s)
    headers = {**scenario.hdr, **step.hdr}
    if step.key:
        headers["Authorization"] = f"Bearer {step.key}"
    ledger_before = play.gateway.ledger
    base = scenario.base or chat(f"A question of {scenario.id}")
    reply = play.ask(scenario.path, merged(base, step.patch), headers)
    assert reply.status == step.status
    assert reply.cache in step.cache.removesuffix(" (L1)").split("-or-"), reply.cache_status
    if step.cache.endswith("(L1)"):
        assert "exact/l2" not in play.gateway.stats["answers"]
    if step.content is not None:
        assert text_of(reply) == step.content
    if step.finish is not None:
        assert finish_of(reply) == step.finish
    if step.ctype is not None:
        assert reply.headers["content-type"].partition(";")[0] == step.ctype
    if step.save:
        play.saved[step.save] = reply
    assert play.first is not None
    seen = Seen(reply, play.first, play.saved, ledger_before, play.gateway.ledger)
    for name, value in step.expect.items():
        STEP_CHECKS[name](seen, value)


def _body(reply: Reply) -> Any:
    return reply.events[0] if is_stream(reply) else reply.json


def _calls(reply: Reply) -> Any:
    return reply.json["choices"][0]["message"]["tool_calls"]


def _is(value: T, understood: T) -> None:
    """A sentence that a check has been written for."""
    if value != understood:
        raise UnreadableError(f"{value!r} isn't {understood!r}")


def _joined(seen: Seen, value: str) -> None:
    assert text_of(seen.reply) == value


def _deltas_min(seen: Seen, value: int) -> None:
    choices = choices_of(seen.reply)
    assert sum(bool(choice["delta"].get("content")) for choice in choices) >= value
    assert choices[0]["delta"]["role"] == "assistant"
    assert choices[-1]["finish_reason"] is not None


def _done(seen: Seen, value: bool) -> None:
    assert (seen.reply.events[-1] == "[DONE]") is value


def _reasoning(seen: Seen, value: str) -> None:
    assert text_of(seen.reply, "reasoning_content") == value


def _usage_equal_to_first(seen: Seen, value: bool) -> None:
    assert (usage_of(seen.reply) == usage_of(seen.first)) is value


def _usage_chunk(seen: Seen, value: bool) -> None:
    assert any("usage" in chunk for chunk in seen.reply.events if chunk != "[DONE]") is value


def _usage_chunk_choices(seen: Seen, value: list[Any]) -> None:
    assert [c["choices"] for c in seen.reply.events[:-1] if c.get("usage") is not None] == [value]


def _single_json(seen: Seen, value: bool) -> None:
    _is(value, understood=True)
    assert isinstance(json.loads(seen.reply.body), dict)


def _id_not_equal(seen: Seen, value: str) -> None:
    assert _body(seen.reply)["id"] != seen.saved_field(value)


def _created_is_int(seen: Seen, value: bool) -> None:
    assert (type(_body(seen.reply)["created"]) is int) is value


def _created_ge(seen: Seen, value: str) -> None:
    assert _body(seen.reply)["created"] >= seen.saved_field(value)


def _model_equal(seen: Seen, value: str) -> None:
    assert _body(seen.reply)["model"] == seen.saved_field(value)


def _finish(seen: Seen, value: str) -> None:
    assert finish_of(seen.reply) == value


def _arguments_equal(seen: Seen, value: bool) -> None:
    said = [call["function"] for call in _calls(seen.reply)]
    assert (said == [call["function"] for call in _calls(seen.first)]) is value


def _tool_call_ids(seen: Seen, value: str) -> None:
    """Ours are stable: the next request names them."""
    _is(value, "fresh or stable by policy, unique within reply")
    ids = [call["id"] for call in _calls(seen.reply)]
    assert len(ids) == len(set(ids))
    assert ids == [call["id"] for call in _calls(seen.first)]


def _cost_gt(seen: Seen, value: float) -> None:
    assert seen.rise("paid") > value


def _cost(seen: Seen, value: float) -> None:
    assert seen.rise("paid") == value


def _saved(seen: Seen, value: str) -> None:
    _is(value, "cost of the first")
    assert seen.rise("saved_by_us") == seen.ledger_before["paid"]


def _usage_in_body(seen: Seen, value: str) -> None:
    _is(value, "original")
    assert usage_of(seen.reply) == usage_of(seen.first)


def _budget_used(seen: Seen, value: str) -> None:
    """There are no budgets yet; what a budget would count is the cost."""
    _is(value, "unchanged")
    assert seen.rise("paid") == 0


STEP_CHECKS: Final[Mapping[str, Callable[[Seen, Any], None]]] = {
    "joined": _joined,
    "deltas_min": _deltas_min,
    "done": _done,
    "reasoning": _reasoning,
    "usage_equal_to_first": _usage_equal_to_first,
    "usage_chunk": _usage_chunk,
    "usage_chunk_choices": _usage_chunk_choices,
    "single_json": _single_json,
    "id_not_equal": _id_not_equal,
    "created_is_int": _created_is_int,
    "created_ge": _created_ge,
    "model_equal": _model_equal,
    "finish": _finish,
    "arguments_equal": _arguments_equal,
    "tool_call_ids": _tool_call_ids,
    "cost_gt": _cost_gt,
    "cost": _cost,
    "saved": _saved,
    "usage_in_body": _usage_in_body,
    "budget_used": _budget_used,
}


# What some steps are followed by -------------------------------------------------------------


def _again(scenario: Steps, seed: int) -> dict[str, Any]:
    """A request like the scenario's that hasn't been asked yet."""
    return chat(f"Another question of {scenario.id}", seed=seed)


def _no_age_is_a_miss(play: Play, scenario: Steps) -> None:
    body = _again(scenario, 1)
    play.ask(scenario.path, body)
    assert play.ask(scenario.path, body, {"Cache-Control": "max-age=0"}).cache == "miss"


def _odd_times_are_refused(play: Play, scenario: Steps) -> None:
    body = _again(scenario, 2)
    wrong = [{"Cache-Control": f"max-age={value}"} for value in ("abc", "-1", "1e12", "")]
    wrong += [{"X-Preheat-Ttl": value} for value in ("-1", "1e12", "1000000000000", "abc", "")]
    for headers in wrong:
        reply = play.ask(scenario.path, body, headers, status=400)
        assert reply.json["error"]["param"] in headers
    assert play.ask(scenario.path, body).cache == "miss"


def _no_store_leaves_no_trace(play: Play, scenario: Steps) -> None:
    body, no_store = _again(scenario, 3), {"Cache-Control": "no-store"}
    assert play.ask(scenario.path, body, no_store).cache == "bypass"
    assert play.ask(scenario.path, body).cache == "miss"
    assert play.ask(scenario.path, body, no_store).cache == "bypass"


def _no_cache_writes(play: Play, scenario: Steps) -> None:
    body, no_cache = _again(scenario, 4), {"Cache-Control": "no-cache"}
    play.ask(scenario.path, body)
    fresh = play.ask(scenario.path, body, no_cache)
    assert fresh.cache == "miss"
    assert text_of(play.ask(scenario.path, body)) == text_of(fresh)


def _only_if_cached_waits_for_nobody(play: Play, scenario: Steps) -> None:
    body, only = _again(scenario, 5), {"Cache-Control": "only-if-cached"}
    play.ask(scenario.path, body, only, status=504)
    play.ask(scenario.path, body)
    assert play.ask(scenario.path, body, only).cache == "hit"


def _belongs_to_the_semantic_layer(play: Play, scenario: Steps) -> None:
    """Nothing to play yet: see LATER in test_response_cache.py."""


ALSO: Final[Mapping[str, Callable[[Play, Steps], None]]] = {
    "max-age=0 means miss": _no_age_is_a_miss,
    'ttl=-1, 1e12, "abc" give 400 or are ignored with a warning header': _odd_times_are_refused,
    "no-store reads and writes nothing": _no_store_leaves_no_trace,
    "no-cache reads nothing, writes": _no_cache_writes,
    "only-if-cached without entry gives 504": _only_if_cached_waits_for_nobody,
    "same three steps with a paraphrase in the semantic layer": _belongs_to_the_semantic_layer,
}


# Other ways to send --------------------------------------------------------------------------


class Round(msgspec.Struct, frozen=True):
    """What came of sending one request again and again."""

    scenario: Repeats
    replies: list[Reply]
    calls: int
    bodies: list[bytes]  # as the engine got them


def _distinct_keys(round_: Round, value: int) -> None:
    keys = {r.cache_status.partition('key="')[2][:32] for r in round_.replies if r.cache == "hit"}
    assert len(keys) == value


def _hits(round_: Round, value: int) -> None:
    assert sum(reply.cache == "hit" for reply in round_.replies) == value


def _round_calls(round_: Round, value: int) -> None:
    assert round_.calls == value


def _distinct_bodies(round_: Round, value: int) -> None:
    assert len({text_of(reply) for reply in round_.replies}) == value


def _bytes_identical(round_: Round, value: bool) -> None:
    _is(value, understood=True)
    assert set(round_.bodies) == {json.dumps(round_.scenario.base).encode()}
    assert len(round_.bodies) == round_.scenario.repeat


def _tool_order(round_: Round, value: list[str]) -> None:
    for body in round_.bodies:
        assert [tool["name"] for tool in json.loads(body)["tools"]] == value


ROUND_CHECKS: Final[Mapping[str, Callable[[Round, Any], None]]] = {
    "distinct_keys": _distinct_keys,
    "hits": _hits,
    "upstream_calls": _round_calls,
    "distinct_bodies": _distinct_bodies,
    "upstream_body_bytes_identical": _bytes_identical,
    "tool_order": _tool_order,
}


def _own_token(asked: list[Any], replies: list[Reply], value: bool) -> None:
    _is(value, understood=True)
    for body, reply in zip(asked, replies, strict=True):
        assert text_of(reply) == f"echo: {body['messages'][-1]['content']}"
        assert is_stream(reply) is body["stream"]


STORM_CHECKS: Final[Mapping[str, Callable[[list[Any], list[Reply], Any], None]]] = {
    "each_reply_contains_own_token": _own_token,
}


def _calls_are(replies: list[Reply], calls: int, value: int) -> None:
    assert calls == value


def _calls_at_most(replies: list[Reply], calls: int, value: int) -> None:
    assert calls <= value


def _all_have_status(replies: list[Reply], calls: int, value: int) -> None:
    assert {reply.status for reply in replies} == {value}


def _not_all_500(replies: list[Reply], calls: int, value: bool) -> None:
    """Not more than the one whose call failed; and what the others got is one answer."""
    _is(value, understood=True)
    assert sum(reply.status == 500 for reply in replies) <= 1
    assert {text_of(reply) for reply in replies if reply.status == 200} == {"ok"}
    assert calls == 2


STAMPEDE_CHECKS: Final[Mapping[str, Callable[[list[Reply], int, Any], None]]] = {
    "upstream_calls": _calls_are,
    "upstream_calls_max": _calls_at_most,
    "all": _all_have_status,
    "others": _all_have_status,
    "not_all_500": _not_all_500,
}


def _different_answers(replies: list[Reply], calls: int, value: bool) -> None:
    answers = {json.dumps(reply.json["output"]) for reply in replies}
    assert (len(answers) == len(replies)) is value


POSTS_CHECKS: Final[Mapping[str, Callable[[list[Reply], int, Any], None]]] = {
    "different_answers": _different_answers,
    "upstream_calls": _calls_are,
}


def _forwarded(scenario: Single, replies: list[Reply], bodies: list[bytes], value: bool) -> None:
    _is(value, understood=True)
    assert set(bodies) == {json.dumps(scenario.body).encode()}


def _stored(scenario: Single, replies: list[Reply], bodies: list[bytes], value: bool) -> None:
    _is(value, understood=False)
    assert [reply.cache for reply in replies] == ["bypass", "bypass"]
    assert len(bodies) == len(replies)


def _usage_kept(
    scenario: Single, replies: list[Reply], bodies: list[bytes], value: list[str]
) -> None:
    for reply in replies:
        assert set(value) <= set(reply.json["usage"])


def _marks(sent: bytes) -> list[list[bool]]:
    """Which blocks of the system prompt, and of each message, are marked."""
    body = json.loads(sent)
    contents = [body["system"], *(message["content"] for message in body["messages"])]
    return [
        ["cache_control" in block for block in content] if isinstance(content, list) else [False]
        for content in contents
    ]


def _breakpoint_on_system(_: Single, __: list[Reply], sent: list[bytes], value: int) -> None:
    for body in sent:
        assert [place for place, is_marked in enumerate(_marks(body)[0]) if is_marked] == [value]


def _breakpoints_at_most(_: Single, __: list[Reply], sent: list[bytes], value: int) -> None:
    assert sent
    assert all(sum(map(sum, _marks(body))) <= value for body in sent)


SINGLE_CHECKS: Final[Mapping[str, Callable[[Single, list[Reply], list[bytes], Any], None]]] = {
    "forwarded": _forwarded,
    "stored_in_response_cache": _stored,
    "usage_fields_kept": _usage_kept,
    "breakpoint_on_system_index": _breakpoint_on_system,
    "breakpoints_max": _breakpoints_at_most,
}


def _entries_at_most(play: Play, scenario: Load, before_bytes: int, value: int) -> None:
    books = play.gateway.stats["l1"]
    assert 0 < books["entries"] <= value
    assert books["bytes"] <= scenario.cfg["l1_max_bytes"]


def _rss_growth_at_most(play: Play, scenario: Load, before_bytes: int, value: int) -> None:
    assert play.gateway_rss_bytes - before_bytes <= value * 2**20


def _swept(play: Play, scenario: Load, before_bytes: int, value: bool) -> None:
    """Entries of a short life leave though nobody asks for them."""
    _is(value, understood=True)
    count = 300
    first = scenario.load.distinct_prompts
    bodies = map(_prompt, range(first, first + count))
    volley(play.gateway.port, scenario.path, bodies, {"X-Preheat-Ttl": "1"})
    play.expect_calls(count)
    deadline = time.monotonic() + 10
    while play.gateway.stats["l1"]["expired"] < count and time.monotonic() < deadline:
        time.sleep(0.1)
    assert play.gateway.stats["l1"]["expired"] == count


LOAD_CHECKS: Final[Mapping[str, Callable[[Play, Load, int, Any], None]]] = {
    "l1_entries_max": _entries_at_most,
    "rss_growth_mb_max": _rss_growth_at_most,
    "expired_entries_swept_without_read": _swept,
}


def _added_latency_at_most(before_s: list[float], after_s: list[float], value: float) -> None:
    assert max(before_s) <= value / 1_000


def _after_breaker_at_most(before_s: list[float], after_s: list[float], value: float) -> None:
    assert statistics.median(after_s) <= value / 1_000


def _asserted_with_each_answer(before_s: list[float], after_s: list[float], value: int) -> None:
    assert value == 200


HANG_CHECKS: Final[Mapping[str, Callable[[list[float], list[float], Any], None]]] = {
    "added_latency_ms_max": _added_latency_at_most,
    "after_breaker_ms_max": _after_breaker_at_most,
    "status": _asserted_with_each_answer,
}
