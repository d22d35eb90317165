"""Users: by name, by number, with and without an entry in the image's files."""

from __future__ import annotations

from pier.errors import SandboxError
from pier.sandbox.conformance.bench import Bench, check, refuses, run


@check("commands run as root inside by default")
async def root_by_default(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        assert (await run(sandbox, "id -u; id -g")).text == "0\n0\n"


@check("a user by name has the ids of the image's own files", needs="users")
async def user_by_name(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        row = "tester:x:1234:2345::/home/tester:/bin/sh"
        await run(sandbox, f"echo '{row}' >>/etc/passwd; echo 'tester:x:2345:' >>/etc/group; mkdir -p /home/tester")
        result = await run(sandbox, "id -u; id -g; echo $HOME", user="tester")
        assert result.text == "1234\n2345\n/home/tester\n", result.text


@check("a user by number needs no entry", needs="users")
async def user_by_number(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        assert (await run(sandbox, "id -u", user="4321")).text == "4321\n"
        assert (await run(sandbox, "id -u; id -g", user="4321:5432")).text == "4321\n5432\n"


@check("the sandbox's own user holds where none is given", needs="users")
async def default_user(bench: Bench) -> None:
    async with bench.sandbox(user="4321:4321") as sandbox:
        assert (await run(sandbox, "id -u")).text == "4321\n"
        assert (await run(sandbox, "id -u", user="0")).text == "0\n"


@check("a user that does not exist is a SandboxError")
async def unknown_user(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await refuses(sandbox.exec("true", user="no-such-user"), SandboxError)


@check("other users may not do what only root may", needs="users")
async def users_are_told_apart(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("/srv/private", b"secret", mode=0o600)
        assert not (await sandbox.exec("cat /srv/private", user="4321")).ok
        assert not (await sandbox.exec("echo x >/etc/hostname", user="4321")).ok
        await run(sandbox, "echo mine >/tmp/mine && cat /tmp/mine", user="4321")
