"""Counters and log lines out; computing numbers is `core.stats`'s business."""
