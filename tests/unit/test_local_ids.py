"""Which ids a user gets, and how a process takes them."""

from __future__ import annotations

import os
import subprocess

import pytest

from pier import idmap
from pier.idmap import IdMap, IdRange

pytestmark = pytest.mark.plain


def test_detect_says_what_this_user_can_have() -> None:
    found = IdMap.detect()
    if os.geteuid() == 0:
        assert found.mode == "root" and found.outside(0) == 100_000
    else:
        assert found.mode in ("subids", "single") and found.outside(0) == os.geteuid()
    assert found.outside(-5) == -1
    assert bool(found.hint) == (found.mode == "single")


def test_granted_ids_are_those_of_the_user(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idmap, "_user_name", lambda uid: "me")
    path = f"{tmp_path}/subuid"
    with open(path, "w") as stream:
        stream.write("you:1:65536\nme:200000:40000\nbroken\nme:x:1\nme:300000:40000\n")
    assert idmap._granted(path, 1234) == (IdRange(1, 200000, 40000), IdRange(40001, 300000, 25535))
    with open(path, "w") as stream:
        stream.write("me:200000:1000\n")
    assert idmap._granted(path, 1234) == ()
    assert idmap._granted(f"{tmp_path}/missing", 1234) == ()


def test_a_mapped_process_is_root_of_its_namespace() -> None:
    argv = idmap.mapped_argv(["/bin/sh", "-c", "id -u; id -g; cat /proc/self/uid_map; exit 7"])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 1 and "Operation not permitted" in done.stderr:
        pytest.skip("this machine lets nobody make user namespaces")
    assert done.returncode == 7, done.stderr
    rows = done.stdout.splitlines()
    assert rows[:2] == ["0", "0"]
    assert rows[2].split() == ["0", str(IdMap.detect().outside(0)), str(IdMap.detect().uids[0].count)]
