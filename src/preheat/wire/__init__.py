"""Bytes to values and back, pure: the formats that gateway, engines and replay share."""
