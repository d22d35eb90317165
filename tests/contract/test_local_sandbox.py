"""What the local backend promises beyond the contract: its host image, ids, changes, listeners after a snapshot."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pier.errors import PierError, SandboxError
from pier.image.model import Image, ImageConfig
from pier.lease import Lease
from pier.sandbox import Limits, Mount, SandboxSpec, host, open_backend
from pier.sandbox.host import HostRoot, host_image
from pier.sandbox.local import LocalBackend
from tests.overlay import overlay

pytestmark = pytest.mark.plain


async def test_host_image_has_the_system_and_nobody_s_business(backend: LocalBackend, pier_home: Path) -> None:
    pier_home.mkdir(parents=True, exist_ok=True)
    (pier_home / "secret").write_text("secret")
    async with await backend.start(SandboxSpec(host_image())) as sandbox:
        assert (await sandbox.exec("test -x /usr/bin/env && ls /etc/passwd")).ok
        assert (await sandbox.exec("ls -A /root /tmp /var/tmp")).text.split() == ["/root:", "/tmp:", "/var/tmp:"]
        homes = await sandbox.exec("find /home /run -type f -o -type s")
        assert homes.text == ""
        assert not (await sandbox.exec(["cat", str(pier_home / "secret")])).ok
        shadow = (await sandbox.exec("cat /etc/shadow")).text
        assert all(row.split(":")[1] in ("*", "!", "") for row in shadow.splitlines())
        assert (await sandbox.exec("for d in /tmp /root /home /run /var/tmp; do echo x > $d/x || exit 1; done")).ok


async def test_host_image_is_copied_on_write(backend: LocalBackend, is_root: bool) -> None:
    async with await backend.start(SandboxSpec(host_image())) as one, await backend.start(one.spec) as two:
        assert (await one.exec("echo changed >> /etc/issue && rm -f /etc/debian_version")).ok
        assert "changed" not in (await two.exec("cat /etc/issue")).text
        assert "changed" not in Path("/etc/issue").read_text()
        if is_root:
            assert (await one.exec("echo x > /usr/bin/pier-test-new")).ok
            assert not Path("/usr/bin/pier-test-new").exists()


async def test_a_directory_that_was_removed_after_it_was_listed_is_left_out(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def prepare(layer: Path) -> HostRoot:
        prepared = host.prepare(layer)
        return replace(prepared, trees=(*prepared.trees, str(tmp_path / "gone")))

    monkeypatch.setattr("pier.sandbox.local.backend.prepare", prepare)
    for _ in range(2):
        async with await backend.start(SandboxSpec(host_image())) as sandbox:
            assert (await sandbox.exec("test -x /usr/bin/env")).ok
            assert not (await sandbox.exec(["ls", str(tmp_path / "gone")])).ok


async def test_root_inside_is_not_root_outside(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as sandbox:
        rows = (await sandbox.exec("cat /proc/self/uid_map")).text.split()
        assert rows[0] == "0"
        process = await sandbox.spawn(["sleep", "1000"])
        status = Path(f"/proc/{sandbox.box.pid}/status").read_text()
        uid = int(next(row for row in status.splitlines() if row.startswith("Uid:")).split()[1])
        assert uid == (100_000 if os.geteuid() == 0 else os.geteuid())
        await process.kill()


async def test_set_uid_programs_work_unless_told_otherwise(backend: LocalBackend) -> None:
    if not (await backend.capabilities()).users:
        pytest.skip("this user has one id only")
    script = "cp /usr/bin/id /var/tmp/id && chmod 4755 /var/tmp/id"
    for forbidden, uid in ((False, "0"), (True, "1234")):
        async with await backend.start(SandboxSpec(host_image(), no_new_privileges=forbidden)) as sandbox:
            assert (await sandbox.exec(script)).ok
            assert (await sandbox.exec("/var/tmp/id -u", user="1234")).text.strip() == uid


async def test_read_write_mount_lands_as_the_caller(backend: LocalBackend, image: Image, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "in").write_text("in")
    mounts = (Mount("/data", shared, read_only=False), Mount("/ro/file", shared / "in"))
    async with await backend.start(SandboxSpec(image, mounts=mounts)) as sandbox:
        assert (await sandbox.exec("cat /data/in /ro/file; echo out > /data/out; echo x > /ro/file")).text == "inin"
    assert (shared / "out").read_text() == "out\n" and (shared / "out").stat().st_uid == os.geteuid()
    assert (shared / "in").read_text() == "in"


async def test_changes_are_told(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as sandbox:
        assert await sandbox.changes() == []
        await sandbox.exec("echo x >/srv/new; echo >>/etc/group; rm /bin/vi; mkdir /srv/empty")
        found = {change.path: change.kind for change in await sandbox.changes()}
        assert found == {"/srv/new": "added", "/etc/group": "changed", "/bin/vi": "removed"}
        taken = await sandbox.snapshot()
        await sandbox.exec("rm /srv/new; echo y >/srv/later")
        found = {change.path: change.kind for change in await sandbox.changes()}
        assert found == {"/srv/later": "added", "/etc/group": "changed", "/bin/vi": "removed"}
        await backend.remove_snapshot(taken)


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"served from outside\n")
        transport.close()


async def test_listeners_outlive_a_snapshot(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as sandbox:
        listener = await sandbox.listen(0, _Echo)
        ask = f"nc 127.0.0.1 {listener.port} </dev/null"
        assert (await sandbox.exec(ask, timeout=60)).text == "served from outside\n"
        taken = await sandbox.snapshot()
        assert (await sandbox.exec(ask, timeout=60)).text == "served from outside\n"
        await backend.remove_snapshot(taken)


async def test_snapshots_go_when_the_last_user_went(backend: LocalBackend, image: Image, pier_home: Path) -> None:
    async with await backend.start(SandboxSpec(image)) as sandbox:
        await sandbox.write_file("/srv/one", b"1")
        first = await sandbox.snapshot()
        await sandbox.write_file("/srv/two", b"2")
        second = await sandbox.snapshot()
        await backend.remove_snapshot(first)
        assert await sandbox.read_file("/srv/one") == b"1"
    async with await backend.start(SandboxSpec(second)) as later:
        assert (await later.exec("cat /srv/one /srv/two")).text == "12"
        await backend.remove_snapshot(second)
        assert (await later.exec("cat /srv/one /srv/two")).text == "12"
    assert not any((pier_home / "snapshots").iterdir())


async def test_image_without_tmp_shell_or_etc(backend: LocalBackend, image: Image, tmp_path: Path) -> None:
    layer = tmp_path / "bare"
    layer.mkdir()
    (layer / "busybox").write_bytes((image.layers[0] / "bin" / "busybox").read_bytes())
    (layer / "busybox").chmod(0o755)
    bare = Image("test/bare", "sha256:0", (layer,), ImageConfig())
    async with await backend.start(SandboxSpec(bare)) as sandbox:
        missing = await sandbox.exec("true")
        assert missing.exit_code == 127 and "/bin/sh: not found" in missing.error_text
        assert (await sandbox.exec(["/busybox", "stat", "-c", "%a", "/tmp"])).text == "1777\n"
        assert (await sandbox.exec(["/busybox", "touch", "/tmp/x"])).ok


async def test_uid_without_passwd_entry(backend: LocalBackend, image: Image) -> None:
    if not (await backend.capabilities()).users:
        pytest.skip("this user has one id only")
    async with await backend.start(SandboxSpec(image)) as sandbox:
        result = await sandbox.exec("id -u; id -g; echo $HOME", user="4321:8765")
        assert result.text == "4321\n8765\n/\n"


async def test_ids_that_are_none_end_no_sandbox(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as sandbox:
        rows = [f"mallory:x:{number}:0::/:/bin/sh" for number in ("²", "9" * 5000, "4294967296", "-1", "1e3", "")]
        await sandbox.write_file("/etc/passwd", "\n".join([*rows, "root:x:0:0:root:/root:/bin/sh", ""]).encode())
        await sandbox.write_file("/etc/group", "\n".join(f"wheel:x:{'9' * 5000}:root" for _ in range(2)).encode())
        for user in ("mallory", "²", "9" * 5000, "0:²"):
            with pytest.raises(PierError):
                await sandbox.exec("true", user=user)
        assert (await sandbox.exec("id -u", user="root")).text == "0\n"


async def test_memory_is_watched_where_no_group_can_be(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image, limits=Limits(memory=64 << 20))) as sandbox:
        result = await sandbox.exec("head -c 400000000 /dev/zero | tail", timeout=120, output_limit=100)
        assert result.exit_code == 137 and result.out_of_memory
        assert (await sandbox.exec("true")).ok


async def test_too_many_files_are_noticed(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image, limits=Limits(disk=8 << 20))) as sandbox:
        script = "i=0; while true; do head -c 1000000 /dev/zero > /srv/$i || exit 1; i=$((i+1)); sleep 0.01; done"
        assert (await sandbox.exec(script, timeout=120)).exit_code == 137


async def test_doctor_tries_a_sandbox(backend: LocalBackend) -> None:
    found = {one.subject: one for one in await backend.doctor()}
    assert found["sandboxes"].ok and found["kernel"].ok
    assert all(one.ok or one.fix for one in found.values())


async def test_a_home_that_cannot_hold_sandboxes_is_told(
    image: Image, tmp_path: Path, pier_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose root is an overlay: overlays cannot lie on top of it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount the file system that this is about")
    (tmp_path / "lower").mkdir()
    with overlay(tmp_path / "lower", tmp_path) as merged:
        monkeypatch.setenv("PIER_HOME", str(merged / "home"))
        with Lease() as lease:
            async with open_backend("local", lease) as backend:
                for root in (image, host_image()):
                    with pytest.raises(SandboxError, match="cannot hold sandboxes") as caught:
                        await backend.start(SandboxSpec(root))
                    assert caught.value.code == "no_place" and "PIER_HOME" in (caught.value.hint or "")
                found = {one.subject: one for one in await backend.doctor()}
                assert not found["sandboxes"].ok and "PIER_HOME" in found["sandboxes"].fix
            assert lease.held() == []
        assert not list((merged / "home/sandboxes").iterdir())


async def test_root_without_shifted_mounts(backend: LocalBackend, image: Image, tmp_path: Path) -> None:
    """On a file system that cannot be mounted with other ids, like overlayfs, sandboxes start and own their files."""
    if os.geteuid() != 0:
        pytest.skip("only root's sandboxes have shifted ids")
    with overlay(image.layers[0], tmp_path) as merged:
        unshifted = Image("test/unshifted", "sha256:3", (merged,), image.config)
        async with await backend.start(SandboxSpec(unshifted)) as sandbox:
            assert not sandbox.box.shifted
            script = (
                "cat /proc/self/uid_map; touch /etc/mine /tmp/t && chown user /etc/mine && stat -c %U /etc/mine /bin"
            )
            assert (await sandbox.exec(script)).text.split() == ["0", "0", "65536", "user", "root"]
            assert (await sandbox.exec("id -u; touch /home/user/x", user="user")).text == "1000\n"
            assert not (await sandbox.exec("mount -t tmpfs none /mnt || echo 1 >/proc/sys/kernel/panic")).ok
            frozen = await sandbox.snapshot()
            async with await backend.start(SandboxSpec(frozen)) as again:
                assert (await again.exec("stat -c %U /etc/mine")).text == "user\n"
            await backend.remove_snapshot(frozen)
        async with await backend.start(SandboxSpec(image)) as usual:
            assert usual.box.shifted


async def test_process_1_shows_nothing_of_the_machine(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as sandbox:
        shown = await sandbox.exec("tr '\\0' ' ' < /proc/1/cmdline; ps -o args; readlink /proc/1/exe || true")
        assert shown.text.startswith("pier-init")
        assert "python" not in shown.text and "/usr" not in shown.text and str(Path.home()) not in shown.text
