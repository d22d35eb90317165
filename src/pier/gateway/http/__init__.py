"""The gateway's HTTP/1.1 server: small, strict and quick.

Whatever two readers could understand differently is refused, since that is how requests are smuggled.
"""
