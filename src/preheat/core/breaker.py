"""When to stop asking something that keeps failing."""

from typing import Final

_MOST_TOKENS: Final = 100.0
_TOKENS_PER_S: Final = 5.0


class Breaker:
    """Closed, open, half-open: after `threshold` failures in a row nobody is let through for
    `open_s`; then one probe at a time is, and its success closes the breaker."""

    def __init__(self, threshold: int = 5, open_s: float = 10.0) -> None:
        self._threshold = max(1, threshold)
        self._open_s = open_s
        self._blocked_until = float("-inf")
        self.failures = 0  # in a row
        self.is_closed = True

    def fresh(self) -> "Breaker":
        """Another one with the same limits."""
        return Breaker(self._threshold, self._open_s)

    def allows(self, now: float) -> bool:
        """May the next call go? While half-open a yes is given once per `open_s`."""
        if self.is_closed:
            return True
        if now < self._blocked_until:
            return False
        self._blocked_until = now + self._open_s
        return True

    def succeeded(self) -> None:
        """The call was answered."""
        self.failures = 0
        self.is_closed = True

    def failed(self, now: float) -> None:
        """The call wasn't."""
        self.failures += 1
        if self.failures >= self._threshold:
            self.is_closed = False
            self._blocked_until = now + self._open_s

    def recovered(self) -> None:
        """Something else than a call says that it is well again: let all through, but the next
        failure opens it at once."""
        self.failures = self._threshold - 1
        self.is_closed = True

    def retry_after_s(self, now: float) -> float:
        """Seconds until the next probe."""
        return 0.0 if self.is_closed else max(0.0, self._blocked_until - now)

    def would_allow(self, now: float) -> bool:
        """Whether a call has a chance; asking doesn't take the probe."""
        return self.is_closed or now >= self._blocked_until


class RetryBudget:
    """How often what was refused may be asked elsewhere: a share of the requests of late and a few
    a second, so that retries can't double the load of servers that are overloaded already."""

    def __init__(self, ratio: float, now: float) -> None:
        self._ratio = ratio
        self._tokens = _MOST_TOKENS
        self._filled_at = now

    def earn(self) -> None:
        """A request came."""
        if self._tokens < _MOST_TOKENS:
            self._tokens += self._ratio

    def take(self, now: float) -> bool:
        """May one be asked again? Never, where the share is 0."""
        if self._ratio <= 0.0:
            return False
        since = self._tokens + (now - self._filled_at) * _TOKENS_PER_S
        self._tokens = min(_MOST_TOKENS, since)
        self._filled_at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
