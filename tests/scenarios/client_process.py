"""A client in a process of its own: posts standard input to a URL, so many times, each time on a
new connection, and prints status, headers and body of every answer.

    python client_process.py URL COUNT < body.json
"""

import json
import sys
import urllib.request


def main(url: str, count: str) -> None:
    # Decoded and encoded again, as a program that builds its request does.
    body = json.dumps(json.load(sys.stdin)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    told = []
    for _ in range(int(count)):
        with urllib.request.urlopen(request, timeout=20) as response:
            told.append((response.status, dict(response.headers), response.read().decode()))
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
