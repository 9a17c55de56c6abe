"""Decisions only: no I/O, no clock, no chance of its own. Time is an argument called `now`."""
