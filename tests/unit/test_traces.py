"""`pier traces`: listing and showing trials, and archives that open anywhere and hold no secrets."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from pier.errors import UsageError
from pier.redact import Redactor
from pier.workspace.capture import capture
from pier.workspace.traces import Scrubbing, export, find_trace, list_traces, traces_home
from tests.host_logs import claude_log, codex_log
from tests.job_tasks import pier

KEY = "sk-ant-api03-" + "A1b2C3d4" * 5
PRIVATE = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEpAIBAAKC\n" * 40 + "-----END RSA PRIVATE KEY-----"


def test_beginnings_of_private_keys_are_searched_once() -> None:
    scrubbing, begun, began = Scrubbing(Redactor()), b"-----BEGIN PRIVATE KEY-----" * 20_000, time.process_time()
    assert scrubbing(begun + PRIVATE.encode() + b" x-----END").endswith(b"-----[REDACTED] x-----END")
    assert time.process_time() - began < 1.5 and scrubbing.found == {"private key": 1}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory with two captured sessions."""
    work = tmp_path / "work"
    work.mkdir()
    env = {"HOME": str(tmp_path / "home")}
    claude_log(tmp_path / "home", work, "aaaa", "The first answer.\x1b[31m")
    capture(None, environ=env, directory=work, output=work / ".pier" / "trials" / "2026-01-01_00-00-01")
    codex_log(tmp_path / "home", work, "bbbb", "The second answer.")
    capture(None, environ=env, directory=work, output=work / ".pier" / "trials" / "2026-01-02_00-00-01")
    return work


def _unpacked(archive: Path, target: Path) -> Path:
    with tarfile.open(archive) as found:
        assert all(member.isreg() for member in found.getmembers())
        assert all(member.uid == member.gid == 0 and not member.name.startswith(("/", "..")) for member in found)
    target.mkdir()
    subprocess.run(["tar", "xzf", archive, "-C", target], check=True)
    return target


def test_traces_are_listed_and_shown(work: Path) -> None:
    (work / "below").mkdir()
    rows = json.loads(pier("traces", "--json", cwd=work / "below", image=None).stdout)
    assert [(row["id"], row["agent"], row["steps"]) for row in rows] == [
        ("2026-01-02_00-00-01", "codex", 1),
        ("2026-01-01_00-00-01", "claude-code", 1),
    ]
    table = pier("traces", cwd=work, image=None).stdout
    assert "2026-01-01_00-00-01" in table and "claude-x" in table
    assert "The second answer." in pier("traces", "show", cwd=work, image=None).stdout
    shown = pier("traces", "show", "2026-01-01", cwd=work, image=None).stdout
    assert "The first answer." in shown and "\x1b" not in shown
    one = json.loads(pier("traces", "2026-01-01", "--json", cwd=work, image=None).stdout)
    assert [row["id"] for row in one] == ["2026-01-01_00-00-01"]


def test_wrong_names_are_refused(work: Path, tmp_path: Path) -> None:
    home = traces_home(work)
    assert find_trace(home, None).name == "2026-01-02_00-00-01"
    for name, said in (("2027", "unknown trace"), ("2026", "2 traces begin"), ("../x", "unknown trace")):
        with pytest.raises(UsageError, match=said):
            find_trace(home, name)
    with pytest.raises(UsageError, match="no traces"):
        traces_home(tmp_path)
    assert "expected one ID" in pier("traces", "--all", "2026", cwd=work, code=2, image=None).stderr
    listed = pier("traces", "--all", cwd=work, image=None).stdout
    assert listed == pier("traces", cwd=work, image=None).stdout
    assert "no such directory" in pier("traces", "-o", "no/where.tar.gz", cwd=work, code=2, image=None).stderr
    assert list_traces(home / "none") == []


def test_the_newest_one_or_all_are_exported(work: Path, tmp_path: Path) -> None:
    said = pier("traces", "-o", "../one.tar.gz", cwd=work, image=None).stdout
    assert "2026-01-02_00-00-01" in said and "0 secrets" in said
    one = _unpacked(tmp_path / "one.tar.gz", tmp_path / "one")
    assert sorted(path.name for path in one.iterdir()) == ["2026-01-02_00-00-01", "redactions.json"]
    assert json.loads((one / "2026-01-02_00-00-01" / "result.json").read_text())["agent_info"]["name"] == "codex"
    pier("traces", "--all", "-o", "../all.tar.gz", cwd=work, image=None)
    assert len(list(_unpacked(tmp_path / "all.tar.gz", tmp_path / "all").glob("*/result.json"))) == 2
    shown = pier("trajectory", "show", str(one / "2026-01-02_00-00-01"), cwd=tmp_path, image=None).stdout
    assert "The second answer." in shown


def test_secrets_are_removed_and_reported(work: Path, tmp_path: Path) -> None:
    trial = work / ".pier" / "trials" / "2026-01-01_00-00-01"
    notes = trial / "agent" / "notes.txt"
    notes.write_text(f"key {KEY}\n{PRIVATE}\nAuthorization: Bearer abcdefghijklmnop12345\nhttps://me:pa55word@h/x\n")
    (trial / "agent" / "data.json").write_text(json.dumps({"text": f"{PRIVATE} and mine-own-value-77"}))
    (trial / "agent" / "state.db").write_bytes(b"SQLite\0" + KEY.encode())
    (trial / "agent" / "fine.bin").write_bytes(b"\0\1\2")
    report = export([trial], tmp_path / "out.tar.gz", Redactor(["mine-own-value-77"]))
    found = _unpacked(tmp_path / "out.tar.gz", tmp_path / "out")
    texts = b"".join(path.read_bytes() for path in found.rglob("*") if path.is_file())
    for secret in (KEY, "MIIEpAIBAAKC", "abcdefghijklmnop12345", "pa55word", "mine-own-value-77"):
        assert secret.encode() not in texts
    assert report.counts() == {
        "Anthropic key": 1,
        "private key": 2,
        "bearer token": 1,
        "password in a URL": 1,
        "value of a secret variable": 1,
    }
    assert json.loads((found / "redactions.json").read_text())["redacted"] == report.redacted
    assert [row["file"].rpartition("/")[2] for row in report.left_out] == ["state.db"]
    assert (found / trial.name / "agent" / "fine.bin").read_bytes() == b"\0\1\2"
    assert KEY in notes.read_text()


def test_no_link_dangles_and_none_is_followed_out(work: Path, tmp_path: Path) -> None:
    trial = work / ".pier" / "trials" / "2026-01-01_00-00-01"
    outside = tmp_path / "outside.txt"
    outside.write_text("not yours")
    (trial / "artifacts").mkdir()
    (trial / "artifacts" / "real.txt").write_text("real")
    (trial / "artifacts" / "copy.txt").symlink_to("real.txt")
    (trial / "artifacts" / "out.txt").symlink_to(outside)
    (trial / "artifacts" / "up.txt").symlink_to("../../../../../outside.txt")
    (trial / "artifacts" / "gone.txt").symlink_to("gone")
    (trial / "artifacts" / "loop").symlink_to(".")
    os.mkfifo(trial / "artifacts" / "pipe")
    report = export([trial], tmp_path / "out.tar.gz", Redactor())
    found = _unpacked(tmp_path / "out.tar.gz", tmp_path / "out") / trial.name / "artifacts"
    assert {path.name: path.read_text() for path in found.iterdir()} == {"real.txt": "real", "copy.txt": "real"}
    left = sorted(row["file"].rpartition("/")[2] for row in report.left_out)
    assert left == ["gone.txt", "loop", "out.txt", "pipe", "up.txt"]


def test_an_archive_that_fails_leaves_the_old_one(work: Path, tmp_path: Path) -> None:
    (tmp_path / "t.tar.gz").write_text("old")
    with pytest.raises(FileNotFoundError):
        export([work / ".pier" / "trials" / "none"], tmp_path / "t.tar.gz", Redactor())
    assert (tmp_path / "t.tar.gz").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []
