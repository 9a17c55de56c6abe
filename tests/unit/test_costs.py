"""The service model, learned; a model's KV bytes by hand; load or recompute, and where to keep."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.costs import (
    Errors,
    ServiceLearner,
    ServiceModel,
    ServiceTimes,
    Tier,
    Timing,
    best_tier,
    break_even_tokens,
    pairs,
    saved_s,
)
from preheat.core.kv_bytes import KvCache, Layers, kv_cache
from preheat.core.least_squares import NonNegative
from preheat.errors import ConfigError

LLAMA_3_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
LLAMA_3_70B = {**LLAMA_3_8B, "num_hidden_layers": 80, "hidden_size": 8192} | {
    "num_attention_heads": 64
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B = {**LLAMA_3_8B, "sliding_window": 4096}
GEMMA_2_9B = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "torch_dtype": "bfloat16",
}
JAMBA = {**LLAMA_3_8B, "attn_layer_period": 8, "attn_layer_offset": 4}
SMOLLM2_135M = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "torch_dtype": "float16",
}


# KV bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (LLAMA_3_8B, 2 * 32 * 8 * 128 * 2),  # 128 KiB
        (LLAMA_3_70B, 2 * 80 * 8 * 128 * 2),  # 320 KiB
        (DEEPSEEK_V3, 576 * 2 * 61),
        (MISTRAL_7B, 2 * 32 * 8 * 128 * 2),
        (GEMMA_2_9B, 2 * 42 * 8 * 256 * 2),
        (GEMMA_3_27B, 2 * 62 * 16 * 128 * 2),
        (JAMBA, 2 * 4 * 8 * 128 * 2),  # layers 4, 12, 20, 28
        (SMOLLM2_135M, 23_040),  # 22.5 KiB, as measured in llama.cpp
    ],
)
def test_bytes_a_token_are_those_of_the_architecture(
    config: dict[str, object], token_bytes: int
) -> None:
    assert kv_cache(config).token_bytes == token_bytes
    assert kv_cache(config).size_bytes(1) == token_bytes


def test_heads_are_read_however_they_are_called() -> None:
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}
    assert kv_cache(gpt2).token_bytes == 2 * 12 * 768 * 4
    falcon = {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71}
    assert kv_cache({**falcon, "multi_query": True}).token_bytes == 2 * 32 * 64 * 2


@pytest.mark.parametrize(
    ("dtype", "vector_bytes"),
    [
        ("float32", 512),
        ("bfloat16", 256),
        ("fp8_e5m2", 128),
        ("int8", 128 + 4),
        ("q8_0", 4 * 34),
        ("q4_0", 4 * 18),
        ("q5_1", 4 * 24),
    ],
)
def test_a_stored_format_counts_its_scales(dtype: str, vector_bytes: int) -> None:
    assert kv_cache(LLAMA_3_8B, dtype=dtype).token_bytes == 2 * 32 * 8 * vector_bytes


def test_an_unfinished_group_is_stored_whole() -> None:
    odd = {**LLAMA_3_8B, "head_dim": 80}
    assert kv_cache(odd, dtype="q8_0").token_bytes == 2 * 32 * 8 * 3 * 34


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 8), (8, 8), (16, 16), (3, 9)])
def test_ranks_split_heads_and_copy_those_they_cannot_split(ranks: int, heads: int) -> None:
    cache = kv_cache(LLAMA_3_70B, tensor_parallel=ranks)
    assert cache.token_bytes == 2 * 80 * heads * 128 * 2


def test_every_rank_keeps_the_whole_of_mla() -> None:
    assert kv_cache(DEEPSEEK_V3, tensor_parallel=8).token_bytes == 8 * 70_272
    assert kv_cache(DEEPSEEK_V3, dtype="fp8").token_bytes == 576 * 61


def test_a_window_is_all_that_a_long_sequence_keeps() -> None:
    cache = kv_cache(MISTRAL_7B)
    assert cache.size_bytes(4096) == cache.size_bytes(100_000) == 4096 * 131_072
    in_blocks = kv_cache(MISTRAL_7B, block_tokens=16)
    assert in_blocks.size_bytes(4096) == 4096 * 131_072
    assert in_blocks.size_bytes(100_000) == (4096 + 16) * 131_072  # it begins within a block


def test_every_other_layer_of_gemma_2_and_five_of_six_of_gemma_3_have_windows() -> None:
    two = kv_cache(GEMMA_2_9B)
    layer = 2 * 8 * 256 * 2
    assert two.size_bytes(8192) == 21 * layer * 8192 + 21 * layer * 4096
    three = kv_cache(GEMMA_3_27B)
    layer = 2 * 16 * 128 * 2
    assert three.size_bytes(32_768) == 10 * layer * 32_768 + 52 * layer * 1024


def test_named_layers_are_taken_at_their_word() -> None:
    kinds = ["sliding_attention", "linear_attention", "full_attention", "mamba"]
    cache = kv_cache({**LLAMA_3_8B, "layer_types": kinds, "sliding_window": 128})
    assert cache.layers == (Layers(1, 4096), Layers(1, 4096, 128))
    pattern = kv_cache({**LLAMA_3_8B, "hybrid_override_pattern": "MM-M*M-"})
    assert pattern.token_bytes == 4096
    with pytest.raises(ConfigError, match="sliding_window isn't given"):
        kv_cache({**LLAMA_3_8B, "layer_types": kinds})


def test_qwen_uses_its_window_only_where_it_says_so() -> None:
    qwen = {**LLAMA_3_8B, "sliding_window": 1024, "max_window_layers": 28}
    assert kv_cache({**qwen, "use_sliding_window": False}).layers == (Layers(32, 4096),)
    used = kv_cache({**qwen, "use_sliding_window": True})
    assert used.layers == (Layers(28, 4096), Layers(4, 4096, 1024))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="says no num_attention_heads"):
        kv_cache({"num_hidden_layers": 2})
    with pytest.raises(ConfigError, match="says no num_hidden_layers"):
        kv_cache({"num_attention_heads": 2, "head_dim": 8})
    with pytest.raises(ConfigError, match=r"KV cache of 'q3_k'"):
        kv_cache(LLAMA_3_8B, dtype="q3_k")


caches = st.builds(
    KvCache,
    st.lists(
        st.builds(Layers, st.integers(1, 9), st.integers(1, 99), st.integers(0, 70)), max_size=3
    ).map(tuple),
    st.sampled_from([1, 7, 16]),
    st.integers(1, 3),
)


@given(caches, st.integers(0, 500), st.integers(0, 500))
def test_more_tokens_never_take_less_and_a_block_is_never_split(
    cache: KvCache, tokens: int, more: int
) -> None:
    size = cache.size_bytes(tokens)
    assert 0 <= size <= cache.size_bytes(tokens + more)
    whole = -(-tokens // cache.block_tokens) * cache.block_tokens
    assert size == cache.size_bytes(whole)
    assert size <= whole * cache.token_bytes


@given(st.integers(2, 70), st.sampled_from([1, 7, 16]), st.integers(0, 500))
def test_a_window_has_room_wherever_it_begins(window: int, block: int, begin: int) -> None:
    held = KvCache((Layers(1, 1, window),), block).size_bytes(begin + window)
    blocks = (begin + window - 1) // block - begin // block + 1
    assert held >= blocks * block


# The service model -------------------------------------------------------------------------------

TRUE = ServiceModel(2e-3, 3e-7, 5e-3, 1e-3, 2e-6)


def timing(model: ServiceModel, new: int, context: int, out: int, noise: float = 1.0) -> Timing:
    ttft_s = (model.step_s + model.prefill_s(new, context)) * noise
    decode_s = model.decode_s(out - 1, new + context + 1, 2.0) * noise
    return Timing(new, context, out, ttft_s, ttft_s + decode_s, 2.0)


def learned(model: ServiceModel, count: int, spread: float = 0.0) -> ServiceLearner:
    chance, learner = random.Random(7), ServiceLearner()
    for _ in range(count):
        noise = chance.lognormvariate(0, spread) if spread else 1.0
        sizes = chance.randrange(1, 4000), chance.randrange(4000), chance.randrange(1, 60)
        learner.learn("m", timing(model, *sizes, noise))
    return learner


def test_prices_are_found_again() -> None:
    learner = learned(TRUE, 60)
    found = learner.service("m")
    assert found is not None
    for name in ServiceModel.__struct_fields__:
        # Steps and sequences always come in twos: only their sum is in the data.
        if name not in ("step_s", "sequence_s"):
            assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    assert found.step_s + 2 * found.sequence_s == pytest.approx(7e-3, rel=1e-3)
    errors = learner.errors("m")
    assert errors is not None
    assert errors.count == 50
    assert errors.p99 < 0.01


def test_noise_shows_in_the_error_and_prices_stay_near() -> None:
    learner = learned(TRUE, 400, 0.2)
    found, errors = learner.service("m"), learner.errors("m")
    assert found is not None
    assert errors is not None
    assert found.prefill_s(2000, 2000) == pytest.approx(TRUE.prefill_s(2000, 2000), rel=0.1)
    assert 0.1 < errors.p50 < 0.2 < errors.p90 < errors.p99


def test_a_slower_engine_is_noticed() -> None:
    chance, learner = random.Random(7), ServiceLearner()
    slower = ServiceModel(*(2 * getattr(TRUE, name) for name in ServiceModel.__struct_fields__))
    for model in (TRUE, slower):
        for _ in range(600):
            learner.learn("m", timing(model, chance.randrange(1, 4000), chance.randrange(4000), 20))
    found = learner.service("m")
    assert found is not None
    assert found.prefill_s(2000, 2000) == pytest.approx(slower.prefill_s(2000, 2000), rel=0.15)


def test_ten_outcomes_are_enough_and_models_are_bounded() -> None:
    learner = ServiceLearner()
    for number in range(9):
        learner.learn("m", timing(TRUE, 100 + number, 10 * number, 9))
    assert learner.service("m") is None
    learner.learn("m", timing(TRUE, 300, 0, 9))
    assert learner.service("m") is not None
    assert learner.errors("m") is None
    for number in range(300):
        learner.learn(f"other-{number}", timing(TRUE, 100, 0, 9))
    assert learner.service("m") is None


def test_instant_answers_are_no_division_by_zero() -> None:
    learner = ServiceLearner()
    for _ in range(20):
        learner.learn("m", Timing(0, 0, 1, 0.0, 0.0))
    assert learner.service("m") is not None


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0, 1000), min_size=3, max_size=3), st.floats(-1000, 1000)),
        max_size=12,
    )
)
def test_no_price_is_negative_and_none_is_better(
    rows: list[tuple[list[float], float]],
) -> None:
    fit = NonNegative(3)
    for row, value in rows:
        fit.add(row, value)
    found = fit.solution()
    assert min(found) >= 0.0

    def loss(prices: tuple[float, ...]) -> float:
        return sum(
            (sum(x * p for x, p in zip(row, prices, strict=True)) - value) ** 2
            for row, value in rows
        )

    least = loss(found)
    slack = 1e-6 * (1.0 + sum(value * value for _, value in rows))
    assert least <= loss((0.0, 0.0, 0.0)) + slack
    for place in range(3):
        for change in (1e-3, -1e-3):
            near = list(found)
            near[place] = max(0.0, near[place] + change)
            assert least <= loss(tuple(near)) + slack


def test_it_equals_scipys(  # Lawson and Hanson's own algorithm
) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="a check against another's work")
    chance = random.Random(3)
    for _ in range(50):
        rows = [[chance.uniform(0, 9) for _ in range(5)] for _ in range(20)]
        values = [chance.uniform(-3, 9) for _ in rows]
        fit = NonNegative(5)
        for row, value in zip(rows, values, strict=True):
            fit.add(row, value)
        assert fit.solution() == pytest.approx(optimize.nnls(rows, values)[0], abs=1e-6)


def test_pairs_are_counted_once() -> None:
    assert pairs(3, 0) == 4.5
    assert pairs(10, 100) == pairs(4, 100) + pairs(6, 104)


def test_errors_are_by_rank() -> None:
    assert Errors.of([0.3, 0.1, 0.2]) == Errors(3, 0.2, 0.3, 0.3)


def test_a_mean_comes_after_ten_and_forgets() -> None:
    times = ServiceTimes()
    for _ in range(9):
        times.learn("m", 1.0)
    assert times.expected_s("m") is None
    times.learn("m", 1.0)
    assert times.expected_s("m") == 1.0
    for _ in range(100):
        times.learn("m", 3.0)
    assert times.expected_s("m") == pytest.approx(3.0, rel=1e-3)


# Load or recompute -------------------------------------------------------------------------------

DRAM = Tier(name="dram", bytes_per_s=20e9, latency_s=1e-3)
SSD = Tier(name="ssd", bytes_per_s=1e9, latency_s=5e-3)
KV_BYTES = 131_072


@pytest.mark.parametrize("tier", [DRAM, SSD])
@pytest.mark.parametrize("context", [0, 10_000])
def test_the_break_even_length_is_where_nothing_is_saved(tier: Tier, context: int) -> None:
    service = ServiceModel()
    tokens = break_even_tokens(service, tier, KV_BYTES, context)
    assert 0 < tokens < 100_000
    at = round(tokens)
    assert saved_s(service, tier, at + 1, (at + 1) * KV_BYTES, context) > 0
    assert saved_s(service, tier, at - 1, (at - 1) * KV_BYTES, context) < 0


def test_by_hand() -> None:
    linear = ServiceModel(token_s=1e-3, attention_s=0.0)
    tier = Tier(name="t", bytes_per_s=1e6, latency_s=0.5)
    assert break_even_tokens(linear, tier, 500) == pytest.approx(1000)  # 0.5 / (1e-3 - 0.5e-3)
    assert break_even_tokens(linear, tier, 2000) == float("inf")
    free = Tier(name="t", bytes_per_s=1e9)
    assert break_even_tokens(linear, free, 500) == 0.0
    slow = Tier(name="t", bytes_per_s=1e5)  # 2e-4 n² / 2 = (5e-3 - 1e-3) n
    square = ServiceModel(token_s=1e-3, attention_s=2e-4)
    assert break_even_tokens(square, slow, 500) == pytest.approx(40)


def test_a_tier_is_chosen_by_value_minus_price() -> None:
    dear = Tier(name="hbm", bytes_per_s=1e12, price=1e-9)
    fair = Tier(name="dram", bytes_per_s=20e9, price=1e-11)
    cheap = Tier(name="ssd", bytes_per_s=1e9, price=0.0)
    tiers = (dear, fair, cheap)

    def chosen(uses: float) -> str | None:
        found = best_tier(tiers, size_bytes=1e9, recompute_s=1.5, uses=uses, hold_s=60.0)
        return found and found.name

    # Values of a use: 1.499, 1.45, 0.5 s; rents: 60, 0.6, 0 s.
    assert chosen(0.5) == "ssd"
    assert chosen(1) == "dram"
    assert chosen(2000) == "hbm"
    assert chosen(0) is None
    nothing = best_tier((cheap,), size_bytes=1e9, recompute_s=0.9, uses=5, hold_s=60.0)
    assert nothing is None  # to load takes longer than to compute
