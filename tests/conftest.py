"""What every suite shares: a private home for pier's state, local backends, and the check that nothing was leaked."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox.local import LocalBackend
from tests.busybox import busybox_image
from tests.leaks import Footprint, mark_session, wait_for_orphans, wait_until_clean

mark_session()

# A shell starts what runs in the background with Ctrl-C ignored, which commands that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time: a submission is not judged by the luck of the draw.
settings.register_profile("steady", max_examples=25, derandomize=True, database=None, deadline=None)
# For the lanes of other Pythons: the language is tested there, not the properties.
settings.register_profile("few", settings.get_profile("steady"), max_examples=10)
# Other examples each time, for `make soak`: an example that failed is kept, and tried first the next time.
examples = DirectoryBasedExampleDatabase(".cache/hypothesis")
settings.register_profile(
    "soak", max_examples=200, derandomize=False, database=examples, deadline=None, print_blob=True
)
settings.load_profile("steady")


E2E = Path(__file__).parent / "e2e"
_homes = itertools.count()


def pytest_itemcollected(item: pytest.Item) -> None:
    if E2E in item.path.parents:
        item.add_marker(pytest.mark.parts)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker begins with some of the files that have slow tests, so that no worker ends with one while the others
    are idle. `--dist worksteal` first gives each worker an equal part of the list."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = sorted({item.path for item in items if item.get_closest_marker("slow")})
    quick = [item for item in items if item.path not in slow]
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        size = (len(items) - len(dealt)) // (workers - worker)
        first = [item for path in slow[worker::workers] for item in items if item.path == path]
        more = max(size - len(first), 0) if worker < workers - 1 else len(quick)
        dealt += first + quick[:more]
        del quick[:more]
    items[:] = dealt


def pytest_collection_finish() -> None:
    """What was imported and collected stays; without it the garbage collector has less to go through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def pier_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a `PIER_HOME` of its own, so that tests see nothing of one another or of the user's, and no test
    uses a login of the user who runs it. pytest's own numbered directories cost a look at all earlier ones."""
    home = tmp_path_factory.getbasetemp() / "homes" / str(next(_homes)) / "pier"
    home.parent.mkdir(parents=True)
    monkeypatch.setenv("PIER_HOME", str(home))
    monkeypatch.setenv("PIER_LOGINS", "off")
    return home


@pytest.fixture
async def backend(pier_home: Path) -> AsyncIterator[LocalBackend]:
    """A local backend of the test's own, which leaves nothing behind."""
    with Lease() as lease:
        async with LocalBackend(lease) as opened:
            yield opened
        assert lease.held() == []
    assert not list(pier_home.glob("sandboxes/*"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalBackend]:
    """A local backend that the tests of a module share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIER_HOME", str(tmp_path_factory.mktemp("home") / "pier"))
        lease = Lease()
        opened = LocalBackend(lease)
    with lease:
        async with opened:
            yield opened
        assert lease.held() == []


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """An image of a few small tools."""
    return busybox_image(tmp_path / "image")


@pytest.fixture(scope="session", autouse=True)
def nothing_leaked() -> Iterator[None]:
    """No process, mount or control group outlives the session."""
    before = Footprint.take()
    yield
    left = wait_until_clean(before, seconds=30)
    assert not left, "leaked:\n" + "\n".join(left)


@pytest.fixture(scope="module", autouse=True)
def no_orphans(request: pytest.FixtureRequest) -> Iterator[None]:
    """No process that a module's tests started outlives the module, whatever its name and parent."""
    yield
    left = wait_for_orphans(request.node.nodeid, seconds=30)
    assert not left, "leaked:\n" + "\n".join(f"process {row}" for row in left)


@pytest.fixture(autouse=True)
def no_stray_threads() -> Iterator[None]:
    """A test ends with no more of its own non-daemon threads than it began with."""
    before = {thread.ident for thread in threading.enumerate() if not thread.daemon}
    yield
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stray = [t for t in threading.enumerate() if not t.daemon and t.ident not in before and not _is_pool(t)]
        if not stray:
            return
        time.sleep(0.05)
    pytest.fail(f"threads left running: {stray}")


def _is_pool(thread: threading.Thread) -> bool:
    return thread.name.startswith(("asyncio_", "ThreadPoolExecutor", "execnet", "pytest"))


@pytest.fixture
def is_root() -> bool:
    return os.geteuid() == 0
