"""The report: one document for what was, what would have been, and what it was worth.

One versioned JSON schema (docs/report.schema.json) for the page of `preheat.dashboard` and for
scripts. Every section may be missing, so that who has less to tell (a live gateway) writes the same
document. Units are in names: `_s` seconds, `_gpu_s` seconds that a GPU computes, `_money` in the
currency of `rate`; a `_ratio` says which one. None is "not measured", never zero.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

SCHEMA: Final = "preheat.report/1"

# msgspec would take a document that names no schema for one of this version.
_VERSIONED: Final = msgspec.defstruct("Versioned", [("schema", str)])

Role = Literal["ours", "baseline", "bound", "other"]


class Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the document, silent where it has nothing to say."""


class Rate(Section, frozen=True, kw_only=True):
    """What a second of a GPU costs: the one rate that turns seconds into money."""

    gpu_hour_money: float
    currency: str = "USD"

    def money(self, gpu_s: float) -> float:
        """What so many GPU-seconds cost."""
        return gpu_s / 3_600 * self.gpu_hour_money


class Trace(Section, frozen=True, kw_only=True):
    """What was replayed, or seen by a live gateway."""

    name: str
    format: str = ""
    requests: int = 0
    sessions: int | None = None
    span_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    block_tokens: int = 0
    skipped_lines: int = 0
    rules: tuple[str, ...] = ()
    """What was done to it before, a sentence each. Composed data is called composed here."""


class ServiceFit(Section, frozen=True, kw_only=True):
    """How the service model was fitted to this very log: to how many answers, and how far it was off
    on later ones that it hadn't seen, as a share."""

    requests: int
    ttft_error_p50_share: float
    ttft_error_p90_share: float
    decode_error_p50_share: float | None = None
    decode_error_p90_share: float | None = None


class Settings(Section, frozen=True, kw_only=True):
    """What it was replayed on. Capacities are tokens of KV a worker."""

    workers: int
    hbm_tokens: int | None = None
    dram_tokens: int = 0
    answers_ttl_s: float | None = None
    """How long the response cache keeps answers."""
    service: dict[str, float] = {}
    """The service model's coefficients by name, in seconds."""
    service_fit: ServiceFit | None = None
    """None where they were assumed or given."""
    command: str = ""
    """What makes this document again."""
    rules: tuple[str, ...] = ()
    """Everything else that was assumed, a sentence each."""


class Summary(Section, frozen=True, kw_only=True):
    """What a newcomer should know after ten seconds, and whether it is little; made by
    `replay.verdict`."""

    sentence: str
    notes: tuple[str, ...] = ()
    is_small: bool = False
    baseline: str
    """Against what it was saved."""
    saved_gpu_s: float | None = None
    """Below zero it is a loss; None where the trace can't tell."""
    saved_share: float | None = None
    """Of the baseline's GPU-seconds of prefill."""
    saved_money: float | None = None
    fleet_share: float | None = None
    """The same seconds, of the time of all GPUs (workers by span)."""
    best_lever: str = ""


class HitCurve(Section, frozen=True, kw_only=True):
    """One policy over capacities: three columns of equal length, capacities ascending."""

    policy: str
    role: Role = "other"
    capacity_blocks: tuple[int, ...]
    capacity_tokens: tuple[int, ...]
    hit_token_ratio: tuple[float, ...]
    """Tokens found ÷ tokens asked for."""
    gap_closed_share: float | None = None
    """Of the room between LRU and Belady; see `replay.verdict.gap_closed`."""

    def __post_init__(self) -> None:
        _same_length(self.policy, self.capacity_blocks, self.capacity_tokens, self.hit_token_ratio)


class Capacity(Section, frozen=True, kw_only=True):
    """Hits against the size of the cache."""

    curves: tuple[HitCurve, ...]
    notes: tuple[str, ...] = ()


class Lever(Section, frozen=True, kw_only=True):
    """One thing that could be done, and what it alone saves of the baseline's prefill."""

    name: str
    note: str = ""
    saved_gpu_s: float
    saved_share: float
    saved_money: float | None = None


class Saved(Section, frozen=True, kw_only=True):
    """GPU-seconds of prefill by lever. Levers overlap, so they don't add up: `together` is a run
    with all of them."""

    baseline: str
    baseline_gpu_s: float
    levers: tuple[Lever, ...]
    together: Lever | None = None
    no_cache_gpu_s: float | None = None
    """Every prompt computed whole."""
    bound_gpu_s: float | None = None
    """One endless cache for all: no prefix computed twice. None with a response cache, which computes
    less than that."""


class Answers(Section, frozen=True, kw_only=True):
    """What the response cache, alone, answered without an engine."""

    requests: int
    """That came, in all."""
    stored_requests: int
    """Answered by a stored answer."""
    joined_requests: int
    """Answered by the flight of an equal request."""
    spared_output_tokens: int | None = None
    """Not generated again; None where the trace doesn't say lengths of answers."""
    notes: tuple[str, ...] = ()


class Waits(Section, frozen=True, kw_only=True):
    """How long requests waited for their first token."""

    mean_s: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None


class Arm(Section, frozen=True, kw_only=True):
    """What one arm's requests waited, and how many (a second, of all) came within the target."""

    name: str
    role: Role = "other"
    ttft: Waits | None = None
    service_ttft: Waits | None = None
    """Without the queue: a request's own prefill and loading only. Stored answers are left out."""
    goodput_per_s: float | None = None
    goodput_share: float | None = None


class Latency(Section, frozen=True, kw_only=True):
    """Time to first token, arm by arm, all at the same arrivals."""

    arms: tuple[Arm, ...]
    slo_ttft_s: float | None = None
    notes: tuple[str, ...] = ()


class RoutingRule(Section, frozen=True, kw_only=True):
    """What one routing rule made of the same requests."""

    name: str
    role: Role = "other"
    prefill_share: float | None = None
    """Prefill done, of what it would be without any cache."""
    hit_token_ratio: float | None = None
    work_max_mean_ratio: float | None = None
    """The busiest worker's prefill seconds ÷ the mean worker's."""
    ttft_mean_s: float | None = None
    ttft_p99_s: float | None = None


class Balance(Section, frozen=True, kw_only=True):
    """Routing rules side by side."""

    rules: tuple[RoutingRule, ...]
    notes: tuple[str, ...] = ()


class PriceCurve(Section, frozen=True, kw_only=True):
    """The going price μ of a memory pool: what room for a GiB of KV is worth for an hour, in
    GPU-seconds. Two columns of equal length."""

    pool: str
    at_s: tuple[float, ...]
    price_gpu_s_per_gib_h: tuple[float, ...]

    def __post_init__(self) -> None:
        _same_length(self.pool, self.at_s, self.price_gpu_s_per_gib_h)


class Price(Section, frozen=True, kw_only=True):
    """The price of memory over time."""

    curves: tuple[PriceCurve, ...]
    notes: tuple[str, ...] = ()


class EventArm(Section, frozen=True, kw_only=True):
    """One arm, minute by minute from the event on (before it below zero): columns of equal length,
    None where no request arrived."""

    name: str
    role: Role = "other"
    minute: tuple[float, ...]
    ttft_p95_s: tuple[float | None, ...]
    hit_token_ratio: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        _same_length(self.name, self.minute, self.ttft_p95_s, self.hit_token_ratio or self.minute)


class Event(Section, frozen=True, kw_only=True):
    """A restart, a rolling deploy, a peak: what the minutes after it were like."""

    name: str
    note: str = ""
    arms: tuple[EventArm, ...]


class Table(Section, frozen=True, kw_only=True):
    """A table as it is read: units stand in the columns' names."""

    title: str
    note: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]
    verdict: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            _same_length(self.title, self.columns, row)


class Mechanism(Section, frozen=True, kw_only=True):
    """What one mechanism added to all the others, in the ablation's unit. May be below zero."""

    name: str
    added: float


class Ablation(Section, frozen=True, kw_only=True):
    """Each mechanism taken away in turn."""

    measure: str
    unit: str = ""
    mechanisms: tuple[Mechanism, ...]


class Report(Section, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """The whole document; sections that are missing weren't measured."""

    kind: Literal["replay", "live"] = "replay"
    preheat_version: str = ""
    rate: Rate | None = None
    trace: Trace | None = None
    settings: Settings | None = None
    summary: Summary | None = None
    capacity: Capacity | None = None
    saved: Saved | None = None
    answers: Answers | None = None
    latency: Latency | None = None
    balance: Balance | None = None
    price: Price | None = None
    events: tuple[Event, ...] = ()
    headroom: tuple[Table, ...] = ()
    ablation: Ablation | None = None
    cautions: tuple[str, ...] = ()
    """What a reader must not conclude from this."""


def encode(report: Report) -> bytes:
    """The document as one line of JSON. What isn't finite was not measured: null."""
    return msgspec.json.encode(report)


def decode(document: bytes) -> Report:
    """It again; `msgspec.ValidationError` names the place that isn't as the schema says."""
    msgspec.json.decode(document, type=_VERSIONED)
    return msgspec.json.decode(document, type=Report)


def _same_length(name: str, *columns: Sequence[object]) -> None:
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(str(len(column)) for column in columns)
        raise ValueError(f"{name}: columns of different lengths ({lengths})")
