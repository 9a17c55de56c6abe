"""The laboratory: drivers beside the gateway that measure and examine instead of serving."""
