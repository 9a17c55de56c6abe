"""What to do, with the engine's own flag. An engine that isn't in a table has no such flag."""

from collections.abc import Mapping
from typing import Final

from preheat.lab.doctor.prefix_cache import SHOW, SHOW_ANY, TURN_ON, TURN_ON_ANY

NAMES: Final[Mapping[str, str]] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "tgi": "TGI",
    "openai": "an OpenAI-compatible server",
    "anthropic": "Anthropic's API",
}
METRICS: Final[Mapping[str, str]] = {
    "vllm": "start vLLM without --disable-log-stats",
    "sglang": "start SGLang with --enable-metrics",
    "llamacpp": "start llama.cpp with --metrics",
    "tgi": "see whether what stands before TGI hides /metrics",
}
PRIORITY: Final[Mapping[str, str]] = {
    "vllm": "start vLLM with --scheduling-policy priority",
    "sglang": "start SGLang with --enable-priority-scheduling",
}
LORA: Final[Mapping[str, str]] = {
    "vllm": "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    "sglang": "start SGLang with --enable-lora",
    "llamacpp": "start llama.cpp with --lora FILE; it loads none later",
    "tgi": "start TGI with LORA_ADAPTERS=NAME; it loads none later",
}
HASH: Final[Mapping[str, str]] = {
    "vllm": "start all with the same --prefix-caching-hash-algo (sha256_cbor is the same everywhere) "
    "and the same PYTHONHASHSEED, e.g. PYTHONHASHSEED=0",
    "sglang": "run the same version everywhere, with the same PYTHONHASHSEED",
}
BLOCK: Final[Mapping[str, str]] = {
    "vllm": "start all with the same --block-size (16, on a CPU 128, unless it is set)",
    "sglang": "start all with the same --page-size",
}
CAPACITY: Final[Mapping[str, str]] = {
    "vllm": "give vLLM more memory (--gpu-memory-utilization, on a CPU VLLM_CPU_KVCACHE_SPACE), or "
    "--kv-cache-dtype fp8",
    "sglang": "give SGLang more memory (--mem-fraction-static), or --enable-hierarchical-cache",
    "llamacpp": "start llama.cpp with a larger --ctx-size (its slots share it) and --cache-ram",
    "tgi": "give TGI more memory (CUDA_MEMORY_FRACTION), or shorter prompts",
}
EVENTS: Final[Mapping[str, str]] = {
    "vllm": 'start vLLM with --kv-events-config \'{"enable_kv_cache_events": true, '
    '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\'',
    "sglang": 'start SGLang with --kv-events-config \'{"publisher": "zmq", '
    '"endpoint": "tcp://*:5557"}\' and --page-size 16',
}
CACHE_RAM: Final = (
    "start llama.cpp with --cache-ram MiB (8192 unless it is set), or with more slots (--parallel)"
)
ONE_BY_ONE: Final = (
    "give each server's own address, not the balancer's (engines.NAME.urls), and let Preheat choose; "
    "else have the balancer keep a conversation on one server"
)


def show(kind: str) -> str:
    """How to have cached tokens told."""
    return SHOW.get(kind, SHOW_ANY)


def turn_on(kind: str) -> str:
    """How to have prefixes cached."""
    return TURN_ON.get(kind, TURN_ON_ANY)
