"""Files as a user: calls that do what that user's shell would, with that user's rights.

Users: by name, by number, with and without an entry in the image's files.
"""

from __future__ import annotations

import asyncio
import stat

from pier.errors import PathError, SandboxError
from pier.sandbox.conformance.bench import Bench, check, check_inside, refuses, run
from pier.sandbox.contract import Sandbox, SandboxSpec

USER = "4321:4322"


@check("relative paths are meant from the working directory, in commands and in files")
async def relative_paths(bench: Bench) -> None:
    async with bench.sandbox(workdir="/srv/work") as sandbox:
        await sandbox.write_file("sub/file", "text")
        assert (await run(sandbox, "pwd; cat sub/file")).text == "/srv/work\ntext"
        assert (await run(sandbox, "pwd", cwd="sub")).text == "/srv/work/sub\n"
        assert await sandbox.read_text("sub/file") == await sandbox.read_text("/srv/work/sub/file") == "text"
        assert await sandbox.download("sub", bench.scratch / "sub") == []
        await sandbox.upload(bench.scratch / "sub", "copy")
        assert [entry.name for entry in await sandbox.list_dir()] == ["copy", "sub"]
        await sandbox.remove("sub")
        assert not await sandbox.exists("sub/file") and await sandbox.exists("copy/file")


@check_inside("text is written as UTF-8 and read back")
async def text_files(sandbox: Sandbox) -> None:
    await sandbox.write_file("/srv/file", "é\n")
    assert await sandbox.read_file("/srv/file") == b"\xc3\xa9\n"
    assert await sandbox.read_text("/srv/file") == "é\n"


@check("a missing path is a FileNotFoundError and a SandboxError in every call that needs one")
async def missing_paths(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        for user in (None, "0:0"):
            for call in (
                sandbox.read_file("/srv/none", user=user),
                sandbox.stat("/srv/none", user=user),
                sandbox.list_dir("/srv/none", user=user),
                sandbox.download("/srv/none", bench.scratch / "none", user=user),
            ):
                error = await refuses(call, FileNotFoundError)
                assert isinstance(error, PathError) and (error.code, error.blame) == ("not_found", "user"), error
            await sandbox.remove("/srv/none", user=user)


@check_inside("stat and list_dir say kind, size, mode and owner")
async def looking(sandbox: Sandbox) -> None:
    await run(sandbox, "cd /srv; printf 12345 >file; chmod 640 file; mkdir dir; ln -s file link; mkfifo fifo")
    rows = {entry.name: (entry.kind, entry.mode, entry.uid) for entry in await sandbox.list_dir("/srv")}
    assert {name: row[0] for name, row in rows.items()} == {
        "dir": "directory", "fifo": "other", "file": "file", "link": "link",
    }  # fmt: skip
    assert rows["file"] == ("file", 0o640, 0)
    assert (await sandbox.stat("/srv/link")).size == 5
    await refuses(sandbox.list_dir("/srv/file"), NotADirectoryError)


@check("what is written as a user belongs to that user, parents included", needs="users")
async def written_as_user(bench: Bench) -> None:
    source = bench.scratch / "tree"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "file").write_text("x")
    (source / "link").symlink_to("sub")
    async with bench.sandbox() as sandbox:
        await sandbox.mkdir("/srv/own", owner=USER)
        await sandbox.write_file("/srv/own/a/b/file", "x", user=USER)
        await sandbox.mkdir("/srv/own/c/d", user=USER, mode=0o700)
        await sandbox.upload(source, "/srv/own/e/f", user=USER)
        await sandbox.upload(source / "sub" / "file", "/srv/own/g/file", user=USER)
        await sandbox.write_file("/srv/given/to/file", "x", owner=USER)
        await sandbox.upload(source, "/srv/given/tree", owner=USER)
        found = await run(sandbox, "find /srv/own /srv/given | xargs stat -c '%u:%g %n' | grep -v '^4321:4322 '; true")
        assert found.text == "", found.text
        assert (await sandbox.stat("/srv/own/c/d")).mode == 0o700
        assert (await sandbox.stat("/srv/own/a/b/file")).mode == 0o644


@check_inside(
    "file calls act as the user that the sandbox names for them, unless a call names another",
    needs="users",
    files_as=USER,
)
async def files_as(sandbox: Sandbox) -> None:
    await refuses(sandbox.write_file("/srv/file", "x"), PermissionError)
    await sandbox.mkdir("/srv/own", owner=USER)
    await sandbox.write_file("/srv/own/file", "x")
    await sandbox.write_file("/srv/own/roots", "x", user="0")
    assert [entry.uid for entry in await sandbox.list_dir("/srv/own")] == [4321, 0]


@check("a working directory that is missing is made for the sandbox's user; one that is there stays", needs="users")
async def made_workdir(bench: Bench) -> None:
    async with bench.sandbox(user=USER, workdir="/srv/new/work") as sandbox:
        assert (await run(sandbox, "pwd; stat -c %u:%g .")).text == "/srv/new/work\n4321:4322\n"
    async with bench.sandbox(user=USER, workdir="/etc") as sandbox:
        assert (await run(sandbox, "pwd; stat -c %u .")).text.splitlines() not in ([], ["/etc", "4321"])
    await refuses(bench.backend.start(SandboxSpec(bench.image, workdir="/etc/passwd")), SandboxError)
    assert bench.held() == []


@check("what a user may not do is a PermissionError, and changes nothing", needs="users")
async def refused_to_user(bench: Bench) -> None:
    source = bench.scratch / "file"
    source.write_text("x")
    async with bench.sandbox() as sandbox:
        await run(sandbox, "cd /srv; mkdir -m 700 closed; echo kept >closed/file; echo kept >file; chmod 600 file")
        for call in (
            sandbox.read_file("/srv/file", user=USER),
            sandbox.read_file("/srv/closed/file", user=USER),
            sandbox.write_file("/srv/file", "x", user=USER),
            sandbox.write_file("/srv/new/file", "x", user=USER),
            sandbox.upload(source, "/srv/file", user=USER),
            sandbox.mkdir("/srv/new", user=USER),
            sandbox.list_dir("/srv/closed", user=USER),
            sandbox.stat("/srv/closed/file", user=USER),
            sandbox.exists("/srv/closed/file", user=USER),
            sandbox.remove("/srv/file", user=USER),
            sandbox.download("/srv/closed", bench.scratch / "closed", user=USER),
        ):
            error = await refuses(call, PermissionError)
            assert isinstance(error, PathError) and (error.code, error.blame) == ("permission_denied", "user"), error
        assert (await run(sandbox, "cd /srv; cat file closed/file; ls")).text == "kept\nkept\nclosed\nfile\n"


@check("as a user, overwriting keeps mode, owner, hard links and symlinks, as a shell does")
async def overwrite_in_place(bench: Bench) -> None:
    source = bench.scratch / "tree"
    source.mkdir()
    (source / "file").write_text("uploaded")
    async with bench.sandbox() as sandbox:
        await run(
            sandbox, "cd /srv; echo old >file; chmod 750 file; ln file hard; ln -s file soft; ln -s made dangling"
        )
        for path in ("/srv/file", "/srv/hard", "/srv/soft"):
            await sandbox.write_file(path, path, user="0:0")
            assert (await run(sandbox, "cd /srv; cat file hard soft; stat -c %a file")).text == path * 3 + "750\n"
        await sandbox.upload(source, "/srv", user="0:0")
        assert (await run(sandbox, "cd /srv; cat hard; stat -c %a file; readlink soft")).text == "uploaded750\nfile\n"
        await sandbox.write_file("/srv/dangling", "x", user="0:0")
        assert await sandbox.read_text("/srv/made") == "x"
        await sandbox.write_file("/srv/file", "", mode=0o604, user="0:0")
        assert (await sandbox.stat("/srv/hard")).mode == 0o604


@check_inside("as a user, links are followed when reading, and a directory is an IsADirectoryError")
async def read_as_user(sandbox: Sandbox) -> None:
    await run(sandbox, "cd /srv; mkdir dir; echo y >dir/in; ln -s dir alias; ln -s alias/in link; mkfifo fifo")
    assert await sandbox.read_text("/srv/link", user="0:0") == "y\n"
    assert await sandbox.read_text("/srv/alias/in", user="0:0") == "y\n"
    await refuses(sandbox.read_file("/srv/alias", user="0:0"), IsADirectoryError)
    await refuses(sandbox.write_file("/srv/alias", "x", user="0:0"), IsADirectoryError)
    assert (await refuses(sandbox.read_file("/srv/fifo", user="0:0"), SandboxError)).code == "not_regular"
    await sandbox.remove("/srv/alias/in", user="0:0")
    await sandbox.remove("/srv/alias", user="0:0")
    assert (await run(sandbox, "ls /srv /srv/dir")).text == "/srv:\ndir\nfifo\nlink\n\n/srv/dir:\n"


@check_inside("a user that does not exist is refused before anything is done")
async def unknown_user_of_files(sandbox: Sandbox) -> None:
    for call in (
        sandbox.write_file("/tmp/x", "x", user="no-such-user"),
        sandbox.write_file("/tmp/x", "x", owner="no-such-user"),
        sandbox.read_file("/etc/passwd", user="no-such-user"),
        sandbox.stat("/", user="no-such-user"),
    ):
        error = await refuses(call, SandboxError)
        assert error.code == "no_such_user" and "no-such-user" in error.message, error
    assert not await sandbox.exists("/tmp/x")


@check("large files and trees go in and out as a user", needs="users")
async def large_as_user(bench: Bench) -> None:
    source = bench.scratch / "tree"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "large").write_bytes(bytes(range(256)) * 20_000)
    (source / "tool").write_text("x")
    (source / "tool").chmod(0o755)
    async with bench.sandbox() as sandbox:
        await sandbox.mkdir("/srv/own", owner=USER)
        await sandbox.upload(source, "/srv/own", user=USER)
        await sandbox.upload(source / "sub" / "large", "/srv/own/large", user=USER)
        data = (source / "sub" / "large").read_bytes()
        assert await sandbox.read_file("/srv/own/large", user=USER) == data
        assert await sandbox.download("/srv/own", bench.scratch / "back", user=USER) == []
    back = bench.scratch / "back"
    assert (back / "sub" / "large").read_bytes() == (back / "large").read_bytes() == data
    assert stat.S_IMODE((back / "tool").stat().st_mode) == 0o755


@check_inside("a user's own processes cannot make a file call hang", needs="users")
async def stopped_by_user(sandbox: Sandbox) -> None:
    """They may stop or kill the process that copies for them; then the call fails, and the next one works."""
    await sandbox.mkdir("/srv/own", owner=USER)
    stop = "while :; do for p in /proc/[0-9]*; do [ $p = /proc/$$ ] || kill -STOP ${p#/proc/}; done; done 2>/dev/null"
    async with await sandbox.spawn(stop, user=USER):
        for _ in range(20):
            try:
                await asyncio.wait_for(sandbox.write_file("/srv/own/x", bytes(1 << 20), user=USER), 60)
            except SandboxError as error:
                assert error.code == "sandbox", error
    await sandbox.write_file("/srv/own/x", "x", user=USER)


@check_inside("commands run as root inside by default")
async def root_by_default(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "id -u; id -g")).text == "0\n0\n"


@check_inside("a user by name has the ids of the image's own files", needs="users")
async def user_by_name(sandbox: Sandbox) -> None:
    row = "tester:x:1234:2345::/home/tester:/bin/sh"
    await run(sandbox, f"echo '{row}' >>/etc/passwd; echo 'tester:x:2345:' >>/etc/group; mkdir -p /home/tester")
    result = await run(sandbox, "id -u; id -g; echo $HOME", user="tester")
    assert result.text == "1234\n2345\n/home/tester\n", result.text


@check_inside("a user by number needs no entry", needs="users")
async def user_by_number(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "id -u", user="4321")).text == "4321\n"
    assert (await run(sandbox, "id -u; id -g", user="4321:5432")).text == "4321\n5432\n"


@check_inside("the sandbox's own user holds where none is given", needs="users", user="4321:4321")
async def default_user(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "id -u")).text == "4321\n"
    assert (await run(sandbox, "id -u", user="0")).text == "0\n"


@check_inside("a user that does not exist is a SandboxError")
async def unknown_user(sandbox: Sandbox) -> None:
    await refuses(sandbox.exec("true", user="no-such-user"), SandboxError)


@check_inside("other users may not do what only root may", needs="users")
async def users_are_distinct(sandbox: Sandbox) -> None:
    await sandbox.write_file("/srv/private", b"secret", mode=0o600)
    assert not (await sandbox.exec("cat /srv/private", user="4321")).ok
    assert not (await sandbox.exec("echo x >/etc/hostname", user="4321")).ok
    await run(sandbox, "echo mine >/tmp/mine && cat /tmp/mine", user="4321")
