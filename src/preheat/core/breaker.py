"""When to stop asking something that keeps failing."""


class Breaker:
    """Closed, open, half-open: after `threshold` failures in a row nobody is let through for
    `open_s`; then one probe at a time is, and its success closes the breaker."""

    def __init__(self, threshold: int = 5, open_s: float = 10.0) -> None:
        self._threshold = max(1, threshold)
        self._open_s = open_s
        self._failures = 0
        self._blocked_until = float("-inf")

    def allows(self, now: float) -> bool:
        """May the next call go? While half-open a yes is given once per `open_s`."""
        if self._failures < self._threshold:
            return True
        if now < self._blocked_until:
            return False
        self._blocked_until = now + self._open_s
        return True

    def succeeded(self) -> None:
        """The call was answered."""
        self._failures = 0

    def failed(self, now: float) -> None:
        """The call wasn't."""
        self._failures += 1
        if self._failures >= self._threshold:
            self._blocked_until = now + self._open_s

    def retry_after_s(self, now: float) -> float:
        """Seconds until the next probe."""
        return max(0.0, self._blocked_until - now) if self._failures >= self._threshold else 0.0

    def would_allow(self, now: float) -> bool:
        """Whether a call has a chance; asking doesn't take the probe."""
        return self._failures < self._threshold or now >= self._blocked_until
