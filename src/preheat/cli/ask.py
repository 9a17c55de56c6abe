"""One short greedy question, asked twice: what a first run shows."""

import http.client
import json
import time
from urllib.parse import urlsplit


def ask_twice(url: str, text: str) -> int:
    """Ask, print both answers with their Cache-Status; 0 if the second one was a hit."""
    statuses = []
    print(f"\nasking twice: {text}")
    try:
        model = _first_model(url)
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        print(f"  no model: {error}", flush=True)
        return 1
    for _ in range(2):
        began_at = time.perf_counter()
        try:
            answer, status = _ask(url, model, text)
        except (OSError, ValueError, http.client.HTTPException) as error:
            print(f"  no answer: {error}", flush=True)
            return 1
        took_ms = (time.perf_counter() - began_at) * 1_000
        print(f"  {answer!r}\n    {took_ms:9.1f} ms   Cache-Status: {status}", flush=True)
        statuses.append(status)
    print()
    return 0 if statuses[1].startswith("preheat; hit") else 1


def _first_model(url: str) -> str:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.request("GET", "/v1/models")
        models = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return str(models["data"][0]["id"])


def _ask(url: str, model: str, text: str) -> tuple[str, str]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=300)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 128,
    }
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        reply = json.loads(response.read())
    finally:
        connection.close()
    status = response.headers.get("Cache-Status", "")
    if response.status != 200:
        return str(reply.get("error", {}).get("message", response.status)), status
    return str(reply["choices"][0]["message"]["content"]), status
