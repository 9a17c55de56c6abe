"""HTTP/1.1 over asyncio, in both directions, at the cost of a C server.

A framework costs 4 to 20 times as much per request as a protocol of one's own over httptools
(docs/measured.md), so the data plane and its upstream client are written directly on
`asyncio.Protocol`. Everything else goes through ASGI.
"""
