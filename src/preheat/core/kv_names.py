"""What a group's blocks of tokens are called: the same for what events tell and for what is asked."""

from typing import Final

from preheat.core.memo import Memo
from preheat.core.tokens import chain_root

LEAST_TOKENS: Final = 16
"""Of a block of ours. An engine with pages of one token (SGLang's default) needn't be known finer."""
_ROOTS: Final = 4_096
_ADAPTERS: Final = 4_096


class KvNames:
    """Of one group of equal servers. `block_tokens` is the unit, 0 until the first event has told the
    engine's. An adapter is known by the name under which events tell of it: before the first of them
    nobody holds anything of it."""

    def __init__(self, secret: bytes) -> None:
        self.block_tokens = 0
        self._secret = secret
        self._adapters: dict[str, None] = {}
        self._roots: Memo[tuple[str, str], int] = Memo(_ROOTS)

    def learn_size(self, engine_block_tokens: int) -> None:
        """The engine's blocks are so large; the first word counts."""
        if not self.block_tokens:
            self.block_tokens = max(LEAST_TOKENS, engine_block_tokens)

    def adopt(self, secret: bytes, block_tokens: int) -> None:
        """Another process gives the names; it may be another one than before."""
        if (secret, block_tokens) != (self._secret, self.block_tokens):
            self._secret, self.block_tokens = secret, block_tokens
            self._roots.clear()

    def root(self, salt: str, lora_name: str) -> int:
        """Where chains begin of which events tell."""
        self.learn_adapter(lora_name)
        return self._root(salt, lora_name)

    @property
    def adapters(self) -> list[str]:
        """All that are known, the newest last."""
        return list(self._adapters)

    def learn_adapter(self, name: str) -> None:
        """It is one."""
        if name and len(self._adapters) < _ADAPTERS:
            self._adapters[name] = None

    def asked_root(self, model: str, salt: str) -> int:
        """Where the chain of a prompt begins: a server takes an adapter's name for a model's."""
        return self._root(salt, model if model in self._adapters else "")

    def _root(self, salt: str, lora_name: str) -> int:
        root = self._roots[salt, lora_name]
        if root is None:
            root = chain_root(self._secret, "", salt, lora_name)
            self._roots.put((salt, lora_name), root)
        return root
