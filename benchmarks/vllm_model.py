"""A model, a tokeniser and an adapter of noise for a vLLM: a folder of a few files, written in a moment."""

from __future__ import annotations

import array
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path

MODEL = "tiny"
ADAPTER = "tuned"
WORDS = [f"w{number}" for number in range(1_900)]
CONTEXT_TOKENS = 2_048

_SPECIAL = ["<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
_LAYERS, _WIDTH, _HEADS, _HEAD, _RANK = 2, 64, 2, 32, 8
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
TEMPLATE_TOKENS = 5
"""Of a system's and a user's message with an answer opened."""


def write_model(folder: Path) -> None:
    """Its weights are made up by the engine; a word is a token."""
    folder.mkdir()
    vocabulary = {word: number for number, word in enumerate(_SPECIAL + WORDS)}
    _write(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=_HEAD,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=CONTEXT_TOKENS,
        vocab_size=len(vocabulary),
        eos_token_id=vocabulary["<|end|>"],
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    _write(
        folder / "tokenizer.json",
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[
            {"id": number, "content": word, "special": True, **flags}
            for number, word in enumerate(_SPECIAL)
        ],
        normalizer=None,
        pre_tokenizer={"type": "WhitespaceSplit"},
        post_processor=None,
        decoder=None,
        model={"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    )
    _write(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        unk_token="<unk>",
        eos_token="<|end|>",
        model_max_length=CONTEXT_TOKENS,
        chat_template=_TEMPLATE,
    )
    _write(folder / "generation_config.json")


def write_adapter(folder: Path) -> None:
    """A LoRA adapter of noise, as PEFT writes one."""
    folder.mkdir()
    modules = ("q_proj", "v_proj")
    _write(
        folder / "adapter_config.json",
        peft_type="LORA",
        task_type="CAUSAL_LM",
        r=_RANK,
        lora_alpha=2 * _RANK,
        lora_dropout=0.0,
        bias="none",
        target_modules=modules,
        inference_mode=True,
    )
    chance = random.Random(1)
    head: dict[str, object] = {}
    data = b""
    for layer in range(_LAYERS):
        for module in modules:
            for part, shape in (("lora_A", (_RANK, _WIDTH)), ("lora_B", (_WIDTH, _RANK))):
                values = [chance.gauss(0.0, 0.05) for _ in range(_RANK * _WIDTH)]
                tensor = array.array("f", values).tobytes()
                head[f"base_model.model.model.layers.{layer}.self_attn.{module}.{part}.weight"] = {
                    "dtype": "F32",
                    "shape": shape,
                    "data_offsets": [len(data), len(data) + len(tensor)],
                }
                data += tensor
    said = json.dumps(head).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(said)) + said + data)


def text(words: Sequence[str]) -> str:
    return " ".join(words)


def _write(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(fields))
