"""Which layers of a container can be read from its host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pier.sandbox.docker import container


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("1 0 0:9 / / rw - overlay overlay rw,lowerdir=/l/B:/l/A,upperdir=/u,workdir=/w", ("/u", ["/l/A", "/l/B"])),
        ("1 0 0:9 / / rw - overlay overlay rw,lowerdir=l/B:l/A,upperdir=u,workdir=w", None),
        (r"1 0 0:9 / / rw - overlay overlay rw,lowerdir=/l\072:/l,upperdir=/u,workdir=/w", None),
        ("1 0 0:9 / / rw shared:1 - ext4 /dev/sda1 rw", None),
    ],
)
def test_only_what_can_be_read_for_certain_counts(
    row: str, expected: tuple[str, list[str]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"2 1 0:5 / /proc rw - proc proc rw\n{row}\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert container.find_layers(os.getpid()) == expected
