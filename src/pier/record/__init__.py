"""Recordings of model calls: the writer, the reader, and redaction."""
