"""Benchmarks: each measures both sides of a claim in one run and writes its figures as JSON."""
