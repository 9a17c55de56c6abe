"""What clients ask and when; the same for the gateway and for the reference."""

import itertools
import json
import random

import msgspec

# By model, how long its engine takes.
DELAYS_S = {"m0": 0.15, "m1": 0.9, "m2": 4.0, "m3": 12.0}
PROMPTS = 400
RATE = 20.0
STREAMED_SHARE = 0.3
LEAVING_SHARE = 0.1
PATIENCE_S = (0.05, 8.0)


class Arrival(msgspec.Struct, frozen=True):
    """One request; `leaves_at` is when its client has had enough."""

    at: float
    model: str
    prompt: str
    is_stream: bool
    leaves_at: float | None

    def body(self) -> bytes:
        fields = {
            "model": self.model,
            "temperature": 0,
            "messages": [{"role": "user", "content": self.prompt}],
        }
        return json.dumps(fields | ({"stream": True} if self.is_stream else {})).encode()


def arrivals(count: int, seed: int = 1) -> list[Arrival]:
    """A Poisson process over prompts by Zipf's law, of 20 to 2,000 characters."""
    rng = random.Random(seed)
    prompts = [f"{n} " + "word " * rng.randint(4, 400) for n in range(PROMPTS)]
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(PROMPTS)))
    at = 0.0
    made = []
    for _ in range(count):
        at += rng.expovariate(RATE)
        number = rng.choices(range(PROMPTS), cum_weights=weights)[0]
        leaves_at = at + rng.uniform(*PATIENCE_S) if rng.random() < LEAVING_SHARE else None
        model = list(DELAYS_S)[number % len(DELAYS_S)]
        is_stream = rng.random() < STREAMED_SHARE
        made.append(Arrival(at, model, prompts[number], is_stream, leaves_at))
    return made
