"""The API as an OpenAPI document; a test compares it with the route table."""

from typing import Any, Final

from preheat import __version__
from preheat.gateway.openapi_warming import ROUTES, SCHEMAS

_TOKEN: Final = {"type": "string", "minLength": 1, "maxLength": 256}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Preheat",
            "version": __version__,
            "summary": "An OpenAI-compatible gateway that has the answer ready.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {**_inference(), **_health(), **_admin()},
        "components": {
            "securitySchemes": {
                "tenant": {"type": "http", "scheme": "bearer"},
                "admin": {"type": "http", "scheme": "bearer"},
            },
            "schemas": {
                "Error": _ERROR,
                "Invalidation": _INVALIDATION,
                "Removed": _REMOVED,
                "Drain": _DRAIN,
                "Drained": _DRAINED,
                "Ended": _ENDED,
                "Freed": _FREED,
                **SCHEMAS,
            },
        },
    }


_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}

_INVALIDATION: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "minProperties": 1,
    "description": "Forget every entry that matches all fields given; keys and tags match any one.",
    "properties": {
        "keys": {
            "type": "array",
            "maxItems": 10_000,
            "items": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
        },
        "tags": {"type": "array", "maxItems": 1_000, "items": _TOKEN},
        "model": _TOKEN,
        "namespace": {"type": "string", "maxLength": 64},
        "tenant": _TOKEN,
        "dry_run": {"type": "boolean", "default": False},
    },
}

_DRAIN: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["upstream", "drain"],
    "properties": {
        "upstream": {**_TOKEN, "description": "Its name, as in X-Preheat-Worker."},
        "drain": {"type": "boolean"},
    },
}

_DRAINED: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["upstream", "drain", "audit_id"],
    "properties": {
        "upstream": {"type": "string"},
        "drain": {"type": "boolean"},
        "audit_id": {"type": "string"},
    },
}

_ENDED: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["session", "state"],
    "properties": {
        "tenant": {**_TOKEN, "description": "Whose; needed where tenants are configured."},
        "session": {
            "type": "string",
            "pattern": "^[\\x21-\\x7e]{1,128}$",
            "description": "As in X-Preheat-Session.",
        },
        "state": {"const": "over"},
    },
}

_FREED: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["tenant", "session", "state", "slots", "file_bytes", "audit_id"],
    "properties": {
        "tenant": {"type": "string"},
        "session": {"type": "string"},
        "state": {"const": "over"},
        "slots": {"type": "integer", "minimum": 0, "description": "They are taken first."},
        "file_bytes": {
            "type": "integer",
            "minimum": 0,
            "description": "Of slot files; they are deleted first.",
        },
        "audit_id": {"type": "string"},
    },
}

_REMOVED: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["matched", "entries", "workers_unheard", "audit_id"],
    "properties": {
        "matched": {"type": "integer", "minimum": 0},
        "entries": {
            "type": "array",
            "description": "The first 1,000 of them.",
            "items": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
        },
        "size_bytes": {"type": "integer", "minimum": 0},
        "workers_unheard": {
            "type": "integer",
            "minimum": 0,
            "description": "Workers that gave no answer in time: they may still tell old answers.",
        },
        "dry_run": {"type": "boolean"},
        "audit_id": {"type": "string"},
    },
}


def _json(schema: dict[str, Any], description: str = "OK") -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _errors(*statuses: int) -> dict[str, Any]:
    reference = {"$ref": "#/components/schemas/Error"}
    return {str(status): _json(reference, "An error") for status in statuses}


def _inference() -> dict[str, Any]:
    chat = {
        "type": "object",
        "required": ["messages"],
        "properties": {
            "model": {"type": "string"},
            "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
            "stream": {"type": ["boolean", "null"]},
            "stream_options": {"type": ["object", "null"]},
            "temperature": {"type": ["number", "null"]},
        },
    }
    completion = {
        "type": "object",
        "required": ["prompt"],
        "properties": {
            "model": {"type": "string"},
            "prompt": {"type": ["string", "array"]},
            "stream": {"type": ["boolean", "null"]},
            "stream_options": {"type": ["object", "null"]},
            "temperature": {"type": ["number", "null"]},
        },
    }
    return {
        "/v1/chat/completions": {
            "post": _ask("Chat completion, from the cache where it may", chat)
        },
        "/v1/completions": {
            "post": _ask("Text completion, from the cache where it may", completion)
        },
        "/v1/models": {
            "get": {
                "operationId": "models",
                "summary": "The models of all engines",
                "security": [{"tenant": []}, {}],
                "responses": {"200": _json({"type": "object"}), **_errors(401, 502, 503, 504)},
            }
        },
    }


def _ask(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    headers = [
        (
            "Cache-Control",
            "RFC 9111: no-cache, no-store, max-age, max-stale, min-fresh, only-if-cached",
        ),
        ("X-Preheat-Namespace", "1 to 64 letters, digits and . _ : -"),
        ("X-Preheat-Tags", "At most 16 tags of at most 64 bytes, by commas"),
        ("X-Preheat-Ttl", "Whole seconds that the answer may be served"),
    ]
    return {
        "operationId": summary.split(maxsplit=1)[0].lower(),
        "summary": summary,
        "security": [{"tenant": []}, {}],
        "parameters": [
            {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
            for name, text in headers
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {
                "description": "The answer; a stream where one was asked for",
                "headers": {
                    "Cache-Status": {"schema": {"type": "string"}, "description": "RFC 9211"}
                },
                "content": {
                    "application/json": {"schema": {"type": "object"}},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **_errors(400, 401, 413, 415, 502, 503, 504),
            "default": _json({}, "Whatever else the engine says"),
        },
    }


def _health() -> dict[str, Any]:
    text = {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {
        "/healthz": {
            "get": {
                "operationId": "healthz",
                "summary": "The process lives",
                "responses": {"200": text},
            }
        },
        "/readyz": {
            "get": {
                "operationId": "readyz",
                "summary": "An engine takes requests, and the gateway isn't draining",
                "responses": {"200": text, "503": text},
            }
        },
        "/metrics": {
            "get": {
                "operationId": "metrics",
                "summary": "Prometheus metrics (docs/metrics.md)",
                "security": [{"admin": []}, {}],
                "responses": {"200": text, **_errors(401, 403)},
            }
        },
    }


def _admin() -> dict[str, Any]:
    def get(name: str, summary: str) -> dict[str, Any]:
        return {
            "get": {
                "operationId": name,
                "summary": summary,
                "security": [{"admin": []}, {}],
                "responses": {"200": _json({"type": "object"}), **_errors(401, 403)},
            }
        }

    def warming(name: str, summary: str, answer: str) -> dict[str, Any]:
        schema = {"$ref": "#/components/schemas/Prefix"}
        return {
            "post": {
                "operationId": name,
                "summary": summary,
                "security": [{"admin": []}, {}],
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                },
                "responses": {
                    "200": _json({"$ref": f"#/components/schemas/{answer}"}),
                    **_errors(400, 401, 403, 404, 413, 415, 429, 502),
                },
            }
        }

    return {
        **{path: warming(*route) for path, *route in ROUTES},
        "/preheat/v1/stats": get("stats", "Hit ratios, L1, L2, latencies, of the whole host"),
        "/preheat/v1/workers": {
            **get("workers", "The worker processes, and how each upstream is, of the whole host"),
            "post": {
                "operationId": "drain",
                "summary": "Let an upstream take nothing more, or requests again",
                "security": [{"admin": []}, {}],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": {"$ref": "#/components/schemas/Drain"}}
                    },
                },
                "responses": {
                    "200": _json({"$ref": "#/components/schemas/Drained"}),
                    **_errors(400, 401, 403, 404, 415, 503),
                },
            },
        },
        "/preheat/v1/sessions": {
            "post": {
                "operationId": "end-session",
                "summary": "Say that a session won't come back: what is kept for it goes first",
                "security": [{"admin": []}, {}],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": {"$ref": "#/components/schemas/Ended"}}
                    },
                },
                "responses": {
                    "200": _json({"$ref": "#/components/schemas/Freed"}),
                    **_errors(400, 401, 403, 415),
                },
            },
        },
        "/preheat/v1/ledger": get("ledger", "What was paid and saved, by tenant, model and layer"),
        "/preheat/v1/config": get("config", "The settings in force"),
        "/preheat/v1/openapi.json": get("openapi", "This document"),
        "/preheat/v1/invalidate": {
            "post": {
                "operationId": "invalidate",
                "summary": "Forget stored answers, or see what would be forgotten",
                "security": [{"admin": []}, {}],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {
                            "schema": {"$ref": "#/components/schemas/Invalidation"}
                        }
                    },
                },
                "responses": {
                    "200": _json({"$ref": "#/components/schemas/Removed"}),
                    **_errors(400, 401, 403, 415, 503),
                },
            }
        },
    }
