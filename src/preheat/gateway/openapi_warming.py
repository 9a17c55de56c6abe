"""The part of the OpenAPI document that is about warming."""

from typing import Any, Final

_WORD: Final = {"type": "string", "minLength": 1, "maxLength": 256}
_NAME: Final = {"type": "string", "maxLength": 256, "default": ""}
_COUNT: Final = {"type": "integer", "minimum": 0}
_SECONDS: Final = {"type": "number", "minimum": 0}

_PREFIX: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "description": "The beginning of a prompt: messages, text or token ids.",
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}},
        "tools": {"type": "array", "items": {"type": "object"}},
        "text": {"type": "string", "minLength": 1},
        "ids": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31},
        },
        "model": {**_NAME, "description": "As clients call it; empty: the first engine's."},
        "adapter": {**_NAME, "description": "A LoRA adapter's name."},
        "tenant": {
            **_WORD,
            "description": "Whose requests shall find it; needed where there are some.",
        },
        "workers": {
            "type": "array",
            "maxItems": 1_024,
            "items": _WORD,
            "description": "Names as in X-Preheat-Worker; none: all that are well.",
        },
        "within_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 600, "default": 60},
    },
    "oneOf": [{"required": ["messages"]}, {"required": ["text"]}, {"required": ["ids"]}],
}

_PROOF: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["verdict", "why"],
    "properties": {
        "verdict": {"enum": ["proven", "refuted", "unknown"]},
        "why": {"type": "string"},
        "warmed_tokens": _COUNT,
        "asked_tokens": _COUNT,
        "cached_tokens": {"type": ["integer", "null"]},
    },
}

_WARMED: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["outcomes", "done", "of", "audit_id"],
    "properties": {
        "outcomes": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["worker", "object", "state", "why", "tokens", "computed_tokens"],
                "properties": {
                    "worker": {"type": "string"},
                    "object": {"type": "string", "description": "A digest of the prefix."},
                    "state": {"enum": ["done", "busy", "failed"]},
                    "why": {"type": "string"},
                    "tokens": _COUNT,
                    "computed_tokens": _COUNT,
                    "chunks": _COUNT,
                    "took_s": _SECONDS,
                    "waited_s": _SECONDS,
                },
            },
        },
        "done": _COUNT,
        "of": _COUNT,
        "audit_id": {"type": "string"},
    },
}

_VERIFIED: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["proofs", "proven", "of", "audit_id"],
    "properties": {
        "proofs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["worker", "proof"],
                "properties": {"worker": {"type": "string"}, "proof": _PROOF},
            },
        },
        "proven": _COUNT,
        "of": _COUNT,
        "audit_id": {"type": "string"},
    },
}

SCHEMAS: Final[dict[str, Any]] = {"Prefix": _PREFIX, "Warmed": _WARMED, "Verified": _VERIFIED}

ROUTES: Final = (
    (
        "/preheat/v1/warm",
        "warm",
        "Have a prefix computed on servers, in their idle moments",
        "Warmed",
    ),
    ("/preheat/v1/verify", "verify", "Whether a prefix is warm on servers, by a probe", "Verified"),
)
"""Path, operation, summary, and the answer's schema."""
