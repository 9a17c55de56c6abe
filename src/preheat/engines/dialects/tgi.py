"""Hugging Face's Text Generation Inference: it caches prefixes and tells nobody.

Read: its API description (2.4 and 3.x, in maintenance since December 2025) and its page on metrics.
No flag makes it tell cached tokens, no call empties its cache, adapters are those of `LORA_ADAPTERS`
at its start: what it holds can only be guessed from the time an answer takes.
"""

from typing import Any, Final

from preheat.engines.dialects.calls import Call, Prompt, get, post
from preheat.engines.dialects.openai import OpenAi
from preheat.engines.dialects.readings import Load, Tokens, ids_of, objects, parsed, part
from preheat.engines.dialects.samples import Page

_RUNNING: Final = "tgi_batch_current_size"
_WAITING: Final = "tgi_queue_size"
_PROMPTS: Final = "tgi_request_input_length_sum"


class Tgi(OpenAi):
    """Its own API for text, OpenAI's for messages."""

    name = "tgi"
    block_tokens = 1
    least_tokens = 0

    def health(self) -> Call:
        return get("/health")

    def load(self) -> Call | None:
        return get("/metrics")

    def read_load(self, body: bytes) -> Load | None:
        page = Page(body, (_RUNNING, _WAITING, _PROMPTS))
        if not page.of(_RUNNING, _WAITING):
            return None
        return Load(
            running=page.sum(_RUNNING),
            waiting=page.sum(_WAITING),
            prompt_tokens_total=page.sum(_PROMPTS),
        )

    def tokenise(self, prompt: Prompt, *, opens_answer: bool = True) -> Call | None:
        """Messages always with the answer's beginning."""
        if prompt.text is not None:
            return post("/tokenize", {"inputs": prompt.text})
        return self._templated(prompt)

    def read_tokens(self, body: bytes) -> Tokens | None:
        """A list of pieces, or one inside of what the template made."""
        value = parsed(body)
        pieces: Any = value if isinstance(value, list) else part(value, "tokenize_response")
        if not isinstance(pieces, list):
            return None
        ids = ids_of([piece.get("id") for piece in objects(pieces)])
        return None if ids is None or len(ids) != len(pieces) else Tokens(len(ids), ids)

    def render(self, prompt: Prompt, *, opens_answer: bool = True) -> Call | None:
        """Always with the answer's beginning."""
        return self._templated(prompt)

    def read_rendered(self, body: bytes) -> str | None:
        text = part(parsed(body), "templated_text")
        return text if isinstance(text, str) else None

    def warm(self, prompt: Prompt) -> Call | None:
        """It takes no token ids."""
        if prompt.messages is not None:
            return post(
                "/v1/chat/completions",
                {
                    "model": prompt.adapter or prompt.model or "tgi",
                    "messages": prompt.messages,
                    "tools": prompt.tools,
                    "max_tokens": 1,
                },
            )
        if prompt.text is None:
            return None
        asked: dict[str, Any] = {"max_new_tokens": 1}
        if prompt.adapter:
            asked["adapter_id"] = prompt.adapter
        return post("/generate", {"inputs": prompt.text, "parameters": asked})

    def _templated(self, prompt: Prompt) -> Call | None:
        if prompt.messages is None:
            return None
        return post(
            "/chat_tokenize",
            {
                "model": prompt.model or "tgi",
                "messages": prompt.messages,
                "tools": prompt.tools,
            },
        )
