"""Logs of requests: our own, and those that others have published.

Needs the extra `log` (pyarrow, numpy); nothing that answers requests imports it.
"""
