"""How many bytes of KV cache a model needs, read from its configuration.

Plain attention keeps a key and a value vector for each token, layer and KV head: 2 · layers ·
KV heads · head size · bytes an element (Pope et al., Efficiently Scaling Transformer Inference,
MLSys 2023). What differs by architecture: fewer KV heads than heads (GQA, Ainslie et al., EMNLP
2023), one compressed vector for keys and values together (MLA, DeepSeek-V2, 2024), layers that
look back a window only, and layers without attention, whose state doesn't grow.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from preheat.errors import ConfigError

Config = Mapping[str, Any]
"""A model's `config.json`, as Hugging Face's transformers write it."""


class Format(msgspec.Struct, frozen=True):
    """How numbers are stored: groups of so many in so many bytes, and `scale_bytes` for each
    vector of one token and head."""

    group: int
    group_bytes: int
    scale_bytes: int = 0

    def vector_bytes(self, size: int) -> int:
        """One vector; the last group is a whole one."""
        return -(-size // self.group) * self.group_bytes + self.scale_bytes


FORMATS: Final[Mapping[str, Format]] = {
    "float32": Format(1, 4),
    "float16": Format(1, 2),
    "bfloat16": Format(1, 2),
    # vLLM's and TensorRT-LLM's: one scale a tensor, which costs a token nothing.
    "fp8": Format(1, 1),
    # A float32 scale for each token and head, as vLLM's int8_per_token_head.
    "int8": Format(1, 1, 4),
    # llama.cpp's blocks of 32 with their float16 scale, and minimum where they have one (ggml).
    "q8_0": Format(32, 34),
    "q5_1": Format(32, 24),
    "q5_0": Format(32, 22),
    "q4_1": Format(32, 20),
    "q4_0": Format(32, 18),
}

_ATTENTION: Final = frozenset({"full_attention", "attention", "hybrid", "*"})
_WINDOWED: Final = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
_ALTERNATING: Final[Mapping[str, int]] = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Every how manieth layer looks at everything, where an older configuration doesn't say it."""


class Layers(msgspec.Struct, frozen=True):
    """Layers of one kind: bytes each keeps a token, and how far back; 0 is everything."""

    count: int
    token_bytes: int
    window: int = 0


class KvCache(msgspec.Struct, frozen=True):
    """The KV cache of one serving process, over all its `ranks`."""

    layers: tuple[Layers, ...]
    block_tokens: int = 1
    ranks: int = 1

    @property
    def token_bytes(self) -> int:
        """What one more token takes while no window is full."""
        return self.ranks * sum(one.count * one.token_bytes for one in self.layers)

    def size_bytes(self, tokens: int) -> int:
        """A sequence of so many tokens, in whole blocks. A window of w tokens lies in at most
        (w - 2) // block + 2 of them."""
        block = self.block_tokens
        total = 0
        for one in self.layers:
            blocks = -(-max(0, tokens) // block)
            if one.window:
                blocks = min(blocks, max(0, one.window - 2) // block + 2 - (one.window == 1))
            total += one.count * one.token_bytes * blocks * block
        return self.ranks * total


def kv_cache(
    config: Config, *, dtype: str = "", tensor_parallel: int = 1, block_tokens: int = 1
) -> KvCache:
    """The cache of a model. `dtype` is what the engine stores it as; empty: the model's own.

    Tensor parallelism splits KV heads over its ranks; with more ranks than heads each rank keeps
    a copy, and of MLA's one vector every rank does. Raises ConfigError where the configuration
    doesn't say enough.

    >>> llama = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    ...          "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
    >>> kv_cache(llama).token_bytes // 1024
    128
    """
    text = config.get("text_config")  # of a model that sees, too
    if isinstance(text, Mapping):
        config = {**config, **text}
    stored = _format(config, dtype)
    vectors = _vectors_bytes(config, stored, tensor_parallel)
    windows = _windows(config)
    kinds: dict[int, int] = {}
    for window in windows:
        kinds[window] = kinds.get(window, 0) + 1
    layers = tuple(Layers(count, vectors, window) for window, count in sorted(kinds.items()))
    return KvCache(layers, block_tokens, tensor_parallel)


def _format(config: Config, dtype: str) -> Format:
    name = dtype or str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    name = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16", "half": "float16"}.get(
        name, "fp8" if name.startswith(("fp8", "float8")) else name
    )
    if name not in FORMATS:
        raise ConfigError(f"a KV cache of {name!r} isn't known; known are {', '.join(FORMATS)}")
    return FORMATS[name]


def _vectors_bytes(config: Config, stored: Format, ranks: int) -> int:
    """What one layer keeps of one token on one rank."""
    rank = config.get("kv_lora_rank")
    if rank:
        rope = _count(config, "qk_rope_head_dim")
        return stored.vector_bytes(int(rank) + rope)
    heads = _count(config, "num_attention_heads", "n_head", "num_heads")
    kv_heads = int(config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads))
    size = config.get("head_dim") or _count(config, "hidden_size", "n_embd", "d_model") // heads
    return 2 * -(-kv_heads // ranks) * stored.vector_bytes(int(size))


def _windows(config: Config) -> list[int]:
    """For each layer that has attention how far back it looks; 0 is everything."""
    window = int(config.get("sliding_window") or config.get("attention_chunk_size") or 0)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds is None and config.get("hybrid_override_pattern"):
        kinds = list(config["hybrid_override_pattern"])  # Nemotron-H: M, - and *
    if kinds is not None:
        return _named_windows(kinds, window)
    count = _count(config, "num_hidden_layers", "n_layer", "num_layers")
    period = config.get("attn_layer_period") or config.get("full_attention_interval")
    if period:  # one layer in so many has attention: Jamba, Qwen3-Next
        return [0] * len(range(int(config.get("attn_layer_offset", 0)), count, int(period)))
    every = config.get("sliding_window_pattern") or _ALTERNATING.get(
        str(config.get("model_type", "")), 0
    )
    if window and every:
        return [0 if (place + 1) % int(every) == 0 else window for place in range(count)]
    if not window or config.get("use_sliding_window") is False:
        return [0] * count
    whole = int(config.get("max_window_layers") or 0) if config.get("use_sliding_window") else 0
    return [0] * min(whole, count) + [window] * max(0, count - whole)


def _named_windows(kinds: Sequence[str], window: int) -> list[int]:
    windows = []
    for kind in kinds:
        if kind in _WINDOWED:
            if not window:
                raise ConfigError(f"a layer is {kind!r}, but sliding_window isn't given")
            windows.append(window)
        elif kind in _ATTENTION:
            windows.append(0)
    return windows


def _count(config: Config, *names: str) -> int:
    for name in names:
        if config.get(name):
            return int(config[name])
    raise ConfigError(f"the model's configuration says no {names[0]}: is it a whole config.json?")
