"""Preheat: an OpenAI-compatible gateway and replay laboratory for LLM inference."""

__version__ = "0.1.0"
