"""Watches a stack from beside: its log, its metrics, its KV events; nothing passes through here."""
