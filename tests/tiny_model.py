"""A 1.8 MB random Llama in a GGUF file: a real engine to test against, written in a moment.

Its words are noise, and they may end at once or not be valid UTF-8. What is real is
everything around them: templates, token counts, KV prefixes, slots, evictions. Assert on
usage, never on text. It has one token a byte, and one for each ChatML mark.
"""

from pathlib import Path

import gguf
import numpy as np

LAYERS = 4
WIDTH = 128
HEADS = 4  # as many for keys and values, so 2 KiB of F16 cache a token
FEED_FORWARD = 384
CONTEXT_TOKENS = 32_768
KV_BYTES_A_TOKEN = LAYERS * WIDTH * 2 * 2
SEED = 20

_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_gguf(path: str | Path) -> None:
    """Write the same bytes every time: the seed is fixed."""
    writer = gguf.GGUFWriter(str(path), "llama")
    _describe(writer)
    _add_tokenizer(writer)
    _add_weights(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter) -> None:
    writer.add_name("tiny random Llama")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    letters = list(_byte_letters().values())
    # llama.cpp wants at least one merge; this one's result is a token like any other.
    pieces = [*letters, "Ġt", *_CONTROL]
    kinds = [gguf.TokenType.NORMAL] * (len(letters) + 1) + [gguf.TokenType.CONTROL] * len(_CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(pieces.index("<|endoftext|>"))
    writer.add_eos_token_id(pieces.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHATML)
    writer.add_vocab_size(len(pieces))


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(hidden)
    }


def _add_weights(writer: gguf.GGUFWriter) -> None:
    chance = np.random.default_rng(SEED)

    def noise(name: str, rows: int, columns: int) -> None:
        values = chance.standard_normal((rows, columns), dtype=np.float32) * 0.02
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    def ones(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))

    vocabulary = 256 + 1 + len(_CONTROL)
    noise("token_embd", vocabulary, WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            noise(f"{block}.{name}", WIDTH, WIDTH)
        ones(f"{block}.ffn_norm")
        noise(f"{block}.ffn_gate", FEED_FORWARD, WIDTH)
        noise(f"{block}.ffn_up", FEED_FORWARD, WIDTH)
        noise(f"{block}.ffn_down", WIDTH, FEED_FORWARD)
    ones("output_norm")
    noise("output", vocabulary, WIDTH)
