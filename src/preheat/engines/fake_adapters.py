"""LoRA adapters of the fake engine, as vLLM offers them: listed as models with a parent, loaded and given up
over HTTP. Refusals are worded as vLLM's sources of September 2026 have them; the limit is not: vLLM swaps
adapters between its memories instead, others refuse."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"

Answer = tuple[int, dict[str, Any] | str]


class FakeAdapters:
    """Those that are loaded, by name: where they lie."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self.loads = 0

    async def load(self, asked: Mapping[str, Any], *, most: int, load_s: float) -> Answer:
        """Status and body; a load takes its time."""
        name, path = asked.get("lora_name"), asked.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            return _refused(400, "Both 'lora_name' and 'lora_path' must be provided.")
        self.loads += 1
        await asyncio.sleep(load_s)
        if name in self.paths:
            return _refused(400, f"The lora adapter '{name}' has already been loaded.")
        if most and len(self.paths) >= most:
            return _refused(400, f"No room for '{name}': {most} adapters are loaded.")
        self.paths[name] = path
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, asked: Mapping[str, Any]) -> Answer:
        """Status and body."""
        name = asked.get("lora_name")
        if not isinstance(name, str) or not name:
            return _refused(400, "'lora_name' needs to be provided to unload a LoRA adapter.")
        if self.paths.pop(name, None) is None:
            return _refused(404, f"The lora adapter '{name}' cannot be found.")
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def listed(self, parent: str, owned_by: str) -> list[dict[str, Any]]:
        """What `/v1/models` has of them."""
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": owned_by,
                "root": path,
                "parent": parent,
            }
            for name, path in self.paths.items()
        ]

    def forget(self) -> None:
        """As a process that has just begun."""
        self.paths.clear()
        self.loads = 0


def unknown(model: object) -> Answer:
    """What is said of a model that isn't there."""
    return _refused(404, f"The model `{model}` does not exist.")


def _refused(status: int, message: str) -> Answer:
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}
