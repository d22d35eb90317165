"""Recordings of model calls: the writer, the reader, and redaction."""

RECORDING = "recording.jsonl"
"""The name of a trial's recording, in `agent/`. The agent chooses all other names there."""
FILE_NAMES = ("calls.jsonl", RECORDING)
"""The names that recordings are found by."""
