"""Reading ELF files and naming another loader in them."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.agent.pack.runtime import read_elf, set_loader
from pier.errors import AgentError


@pytest.fixture
def program(tmp_path: Path) -> Path:
    copy = tmp_path / "program"
    shutil.copyfile(Path("/bin/bash").resolve(), copy)
    return copy


def test_a_program_tells_its_loader_and_libraries(program: Path) -> None:
    elf = read_elf(program)
    assert elf is not None
    assert elf.loader is not None and elf.loader.startswith("/lib")
    assert "libc.so.6" in elf.needed
    assert elf.machine == {"x86_64": 62, "aarch64": 183}[platform.machine()]


def test_another_loader_is_named_without_moving_a_byte(program: Path) -> None:
    before = program.read_bytes()
    old = read_elf(program)
    set_loader(program, "/opt/x/ld.so")
    new = read_elf(program)
    assert old is not None and new is not None
    assert new.loader == "/opt/x/ld.so" and new.needed == old.needed
    offset, length = old.loader_at
    after = program.read_bytes()
    assert after[:offset] == before[:offset] and after[offset + length :] == before[offset + length :]


def test_a_loader_that_does_not_fit_is_refused(program: Path) -> None:
    with pytest.raises(AgentError, match="no room"):
        set_loader(program, "/" + "x" * 100)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\n" * 20)
    assert read_elf(text) is None
    set_loader(text, "/opt/x/ld.so")
    assert text.read_text() == "#!/bin/sh\n" * 20


@given(st.binary(max_size=400))
def test_a_broken_file_is_no_crash(tmp_path_factory: pytest.TempPathFactory, rest: bytes) -> None:
    path = tmp_path_factory.mktemp("elf") / "broken"
    path.write_bytes(b"\x7fELF\x02\x01" + rest)
    read_elf(path)
