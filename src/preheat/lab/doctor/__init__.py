"""Finds out why something doesn't work, or why there are no hits: checks that end in findings.

A check is a small function; a finding says what was found, why it matters and what to do.
"""
