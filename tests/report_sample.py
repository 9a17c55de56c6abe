"""A report of invented numbers with a plausible shape: for looking at the page, never a result."""

import math

from preheat.replay.report import (
    Ablation,
    Answers,
    Arm,
    Balance,
    Capacity,
    Event,
    EventArm,
    HitCurve,
    Latency,
    Lever,
    Mechanism,
    Price,
    PriceCurve,
    Rate,
    Report,
    RoutingRule,
    Saved,
    Settings,
    Table,
    Trace,
    Waits,
)
from preheat.replay.verdict import gap_closed, summary_of

RATE = Rate(gpu_hour_money=2.5)
BASELINE_GPU_S = 48_210.0


def sample(name: str = "Sample: invented agents, 8 workers", points: int = 600) -> Report:
    """Every section there is; the price curve has so many points."""
    saved = _saved()
    return Report(
        preheat_version="0.1.0",
        rate=RATE,
        trace=Trace(
            name=name,
            format="weka",
            requests=21_043,
            sessions=352,
            span_s=86_400,
            input_tokens=1_904_000_000,
            output_tokens=9_400_000,
            block_tokens=1024,
            skipped_lines=3,
            rules=(
                "Composed: sessions start by a Poisson calendar (seed 1), 80 open on average.",
                "Timestamps of 3 s batches were spread evenly.",
            ),
        ),
        settings=Settings(
            workers=8,
            hbm_tokens=1_000_000,
            dram_tokens=4_000_000,
            answers_ttl_s=3_600,
            service={"token_s": 8e-5, "attention_s": 2.62144e-9},
            command="preheat replay agents/ --workers 8 --hbm 1M --dram 4M --html report.html",
            rules=("Clients wait for their answers (closed loop).",),
        ),
        summary=summary_of(
            saved,
            RATE,
            notes=("A cache on one worker is of no use to a session that lands on another.",),
        ),
        capacity=_capacity(),
        saved=saved,
        answers=Answers(
            requests=21_043,
            stored_requests=310,
            joined_requests=42,
            spared_output_tokens=140_800,
            notes=("Decoding that was saved is not in the GPU-seconds.",),
        ),
        latency=_latency(),
        balance=_balance(),
        price=_price(points),
        events=(
            _event("Rolling deploy, 60 s apart, load 0.9"),
            _event("One worker of eight restarts"),
        ),
        headroom=_headroom(),
        ablation=_ablation(),
        cautions=(
            "Invented numbers, for looking at the page.",
            "A cache that evicts by hold value is possible only if the engine allowed it.",
        ),
    )


def lever(name: str, share: float, note: str = "") -> Lever:
    gpu_s = share * BASELINE_GPU_S
    return Lever(
        name=name,
        note=note,
        saved_gpu_s=gpu_s,
        saved_share=share,
        saved_money=RATE.money(gpu_s),
    )


def _saved() -> Saved:
    return Saved(
        baseline="Round robin, each engine's own LRU",
        baseline_gpu_s=BASELINE_GPU_S,
        no_cache_gpu_s=75_300,
        bound_gpu_s=5_720,
        together=lever("Everything together", 0.868),
        levers=(
            lever("Routing that prices a miss", 0.846, note="needs nothing of the engine"),
            lever("DRAM tier, read on demand", 0.312, note="LMCache or HiCache"),
            lever("Session over, told by the client", 0.094),
            lever("Copies before recompute after a deploy", 0.031),
            lever("Hold value instead of LRU", 0.012, note="if the engine allowed it"),
            lever("Yesterday's list recomputed", -0.044),
        ),
    )


def _capacity() -> Capacity:
    blocks = (128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
    tokens = tuple(block * 512 for block in blocks)

    def hits(half: float, most: float = 0.62) -> tuple[float, ...]:
        return tuple(most / (1 + (half / block) ** 0.9) for block in blocks)

    lru, belady = hits(2_600), hits(800)
    curves = [
        HitCurve(
            policy="infinite",
            role="bound",
            capacity_blocks=blocks,
            capacity_tokens=tokens,
            hit_token_ratio=(0.62,) * len(blocks),
        )
    ]
    policies = (
        ("belady", "bound", 800),
        ("j", "ours", 1_700),
        ("lru", "baseline", 2_600),
        ("s3fifo", "other", 2_350),
        ("gdsf", "other", 2_050),
        ("sieve", "other", 2_500),
        ("lhd", "other", 1_950),
    )
    for policy, role, half in policies:
        closed = gap_closed(hits(half), lru, belady) or 0.0
        is_told = policy not in ("belady", "lru")
        curves.append(
            HitCurve(
                policy=policy,
                role=role,
                capacity_blocks=blocks,
                capacity_tokens=tokens,
                hit_token_ratio=hits(half),
                gap_closed_share=closed if is_told else None,
            )
        )
    return Capacity(curves=tuple(curves), notes=("Only if the engine allowed it: all but LRU.",))


def _latency() -> Latency:
    rows = (
        ("Round robin, LRU", "baseline", 61.0, 41.0, 214.0, 248.0, 9.1, 0.11),
        ("Least loaded, LRU", "other", 7.9, 3.6, 17.0, 30.0, 8.7, 0.44),
        ("Priced routing", "ours", 2.4, 0.98, 7.4, 25.0, 2.0, 0.86),
        ("Priced routing and DRAM tier", "ours", 1.6, 0.44, 3.8, 19.6, 1.2, 0.93),
        ("One endless shared cache", "bound", 1.4, 0.43, 3.6, 19.5, 1.1, 0.94),
    )
    return Latency(
        slo_ttft_s=2.0,
        arms=tuple(
            Arm(
                name=name,
                role=role,
                ttft=Waits(mean_s=mean, p50_s=p50, p95_s=p95, p99_s=p99),
                service_ttft=Waits(mean_s=service, p95_s=3 * service),
                goodput_share=good,
                goodput_per_s=good * 0.2436,
            )
            for name, role, mean, p50, p95, p99, service, good in rows
        ),
    )


def _balance() -> Balance:
    rows = (
        ("round robin", "baseline", 0.64, 0.36, 1.03, 61.0, 248.0),
        ("power of two", "other", 0.63, 0.37, 1.05, 8.3, 31.0),
        ("sglang-router", "other", 0.128, 0.87, 1.31, 5.1, 88.0),
        ("llm-d", "other", 0.116, 0.88, 1.22, 4.4, 61.0),
        ("ours: queue, miss and what it does to others", "ours", 0.083, 0.91, 1.12, 2.4, 25.0),
    )
    return Balance(
        rules=tuple(
            RoutingRule(
                name=name,
                role=role,
                prefill_share=prefill,
                hit_token_ratio=hits,
                work_max_mean_ratio=balance,
                ttft_mean_s=mean,
                ttft_p99_s=p99,
            )
            for name, role, prefill, hits, balance, mean, p99 in rows
        )
    )


def _price(points: int) -> Price:
    at_s = tuple(86_400 * n / points for n in range(points))

    def wave(peak: float, phase: float) -> tuple[float, ...]:
        return tuple(
            peak * (1 + math.sin(at / 13_750 + phase)) * (1 + 0.15 * math.sin(at / 211))
            for at in at_s
        )

    return Price(
        curves=(
            PriceCurve(pool="HBM", at_s=at_s, price_gpu_s_per_gib_h=wave(14.0, 4.0)),
            PriceCurve(pool="DRAM", at_s=at_s, price_gpu_s_per_gib_h=wave(1.9, 4.2)),
        )
    )


def _event(name: str) -> Event:
    minutes = tuple(float(minute) for minute in range(-5, 16))

    def p95(peak: float, minutes_back: float) -> tuple[float, ...]:
        return tuple(
            4.0 if m < 0 else 4.0 + peak * math.exp(-m / minutes_back) * (m + 1) / 2
            for m in minutes
        )

    def hits(drop: float, minutes_back: float) -> tuple[float, ...]:
        return tuple(0.9 if m < 0 else 0.9 - drop * math.exp(-m / minutes_back) for m in minutes)

    arms = (
        ("nothing", "baseline", 14.0, 4.0, 0.7),
        ("restored from SSD", "other", 5.0, 2.0, 0.35),
        ("restored from DRAM", "ours", 1.0, 1.5, 0.1),
        ("never restarted", "bound", 0.0, 1.0, 0.0),
    )
    return Event(
        name=name,
        note="Each worker is empty after its restart; the load goes on.",
        arms=tuple(
            EventArm(
                name=arm,
                role=role,
                minute=minutes,
                ttft_p95_s=p95(peak, back),
                hit_token_ratio=hits(drop, back),
            )
            for arm, role, peak, back, drop in arms
        ),
    )


def _headroom() -> tuple[Table, ...]:
    return (
        Table(
            title="Pauses: keep, restore or recompute",
            columns=(
                "KV tokens a session",
                "lost with LRU, s/day",
                "of prefill",
                "J",
                "session over known",
                "clairvoyant",
                "TTFT p95, LRU",
                "TTFT p95, DRAM",
            ),
            rows=(
                ("16 k", 11_339, "90%", "-2%", None, "-29%", "39 s", "4.1 s"),
                ("64 k", 1_010, "45%", "-2%", "-14%", "-62%", "11.4 s", "3.6 s"),
                ("256 k", 53, "4%", "+23%", None, "-100%", "3.7 s", "3.6 s"),
            ),
            note="Seconds of one GPU a day for each open session.",
            verdict="a tier read on demand: big; holding values: small here.",
        ),
        Table(
            title="New sessions' trunks",
            columns=("KV tokens a session", "resident at arrival", "lost, s/day", "of prefill"),
            rows=(("64 k", "44%", 233, "0.5%"), ("512 k", "80%", 73, "0.3%")),
            verdict="small here.",
        ),
    )


def _ablation() -> Ablation:
    rows = (
        ("what a miss does to the others", 1.9),
        ("queue", 1.2),
        ("price of bytes pushed out", 0.3),
        ("session over", -0.1),
    )
    return Ablation(
        measure="Prefill done, in points of what it would be without any cache, that came back "
        "when the mechanism was switched off",
        unit="points",
        mechanisms=tuple(Mechanism(name=name, added=added) for name, added in rows),
    )
