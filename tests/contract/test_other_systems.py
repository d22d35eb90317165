"""pier on systems other than Linux: commands load there, and say what to use instead of the local backend.

No such system is at hand, so a process of its own takes away what only Linux has before it imports pier.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PRELUDE = """
import asyncio, os, select, signal, socket, sys, sysconfig, types
ONLY_LINUX = {
    os: "O_PATH O_TMPFILE memfd_create pidfd_open eventfd splice setns unshare sched_getaffinity sched_setaffinity "
        "getxattr setxattr listxattr removexattr copy_file_range posix_fadvise posix_fallocate getrandom",
    socket: "AF_NETLINK AF_PACKET AF_VSOCK AF_ALG SO_PEERCRED SO_BINDTODEVICE SO_MARK SOCK_CLOEXEC SOCK_NONBLOCK",
    select: "epoll EPOLLIN EPOLLOUT EPOLLET EPOLLHUP EPOLLERR EPOLLONESHOT EPOLLRDHUP",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX SIGPWR SIGPOLL sigtimedwait sigwaitinfo",
}
sysconfig.get_config_vars()
for module, names in ONLY_LINUX.items():
    for name in names.split():
        vars(module).pop(name, None)
sys.platform = "darwin"
proxies = sys.modules["_scproxy"] = types.ModuleType("_scproxy")  # the standard library's own part of that system
proxies._get_proxies = proxies._get_proxy_settings = dict
import fcntl
fcntl.F_GETPATH = 50
sys.modules["pier.sandbox.local.backend"] = None  # importing it fails
"""


def elsewhere(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_commands_load_without_linux(tmp_path: Path) -> None:
    code = """
import importlib
from pier.cli.main import COMMANDS
for place, _ in COMMANDS.values():
    importlib.import_module(place.partition(":")[0])
for name in ("pier.job.command", "pier.job.runner", "pier.job.view", "pier.trial.run", "pier.sandbox.docker"):
    importlib.import_module(name)
print(len(COMMANDS))
"""
    done = elsewhere(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 10


def test_trees_are_read_part_by_part(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_text("content")
    (tmp_path / "link").symlink_to("deep")
    code = """
from pathlib import Path
from pier.tree import Tree
with Tree(Path.cwd()) as tree:
    print(tree.read("deep/file", 100), tree.find("link/file"))
    tree.write("new/file", b"x")
"""
    done = elsewhere(code, tmp_path)
    assert done.stdout == "b'content' None\n", done.stderr[-3000:]
    assert (tmp_path / "new" / "file").read_bytes() == b"x"


def test_the_local_backend_names_the_alternative(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    code = """
from pier.cli.main import main
main(["task", "init", "hello"])
"""
    assert elsewhere(code, tmp_path).returncode == 0
    done = elsewhere('from pier.cli.main import main\nmain(["run", "hello", "--image", "host"])', tmp_path)
    assert done.returncode == 2 and "--env docker" in done.stderr, done.stderr[-3000:]
    assert not (tmp_path / "jobs").exists()
