"""L1: answers in this process's memory."""

from preheat.core.types import Key
from preheat.wire.openai import Answer


class MemoryStore:
    """A dict of answers. The inventory says what goes in and out, so it has no bound of its own."""

    def __init__(self) -> None:
        self._answers: dict[Key, Answer] = {}

    def get(self, key: Key) -> Answer | None:
        return self._answers.get(key)

    def put(self, key: Key, answer: Answer) -> None:
        self._answers[key] = answer

    def delete(self, key: Key) -> None:
        self._answers.pop(key, None)

    def __len__(self) -> int:
        return len(self._answers)
