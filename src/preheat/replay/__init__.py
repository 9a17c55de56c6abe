"""The laboratory's clock: a trace against the same core, in simulated time."""
