"""HTTP/1.1 as the gateway needs it: small, strict, and quick on both sides.

`message` reads and writes heads and bodies, `server` answers agents, `client` asks providers. What two readers could
understand differently is refused, since that is how requests are smuggled.
"""
