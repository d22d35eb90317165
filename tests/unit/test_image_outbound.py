"""Downloads on a task's behalf through the user's proxy."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web

from pier.errors import ImageError
from pier.image.outbound import download_for_add
from pier.network.policy import PUBLIC, NetworkPolicy
from tests.image_rig import running_server


async def test_the_users_proxy_is_used_and_what_it_is_asked_for_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    async def proxy(request: web.Request) -> web.Response:
        asked.append((request.raw_path, "Authorization" in request.headers))
        if request.raw_path.endswith("/to"):
            return web.Response(status=302, headers={"Location": "http://169.254.169.254/x"})
        return web.Response(body=b"fetched")

    (tmp_path / ".netrc").write_text("default login me password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "")
    async with running_server(proxy) as address:
        monkeypatch.setenv("http_proxy", f"http://{address}")
        path, _ = await download_for_add("http://93.184.216.34/file", tmp_path, PUBLIC)
        for url in (
            f"http://{address}/own",
            "http://127.0.0.1/x",
            "http://169.254.169.254/x",
            "http://93.184.216.34/to",
        ):
            with pytest.raises(ImageError) as caught:
                await download_for_add(url, tmp_path, PUBLIC)
            assert caught.value.code == "refused", url
        with pytest.raises(ImageError, match=r"refuses 93\.184\.216\.34:80: not allowed"):
            await download_for_add("http://93.184.216.34/file", tmp_path, NetworkPolicy("allowlist", ("192.0.2.1",)))
    assert path.read_bytes() == b"fetched"
    assert asked == [("http://93.184.216.34/file", False), ("http://93.184.216.34/to", False)]
