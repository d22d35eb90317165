"""A sandbox with no network at all reaches its model, with its own key and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pier.endpoint import GATEWAY_PORT
from pier.gateway import Gateway
from pier.lease import Lease
from pier.record import reader
from pier.sandbox import open_backend
from pier.sandbox.contract import SandboxSpec
from pier.wire.turn import Request, Turn
from tests.busybox import busybox_image
from tests.gateway_fakes import HELLO, request_body

pytestmark = pytest.mark.plain
ASK = 'wget -q -O - --header "Authorization: Bearer $KEY" --post-data "$BODY" "$URL/v1/chat/completions"'


async def hello(request: Request) -> Turn:
    return HELLO


async def test_a_closed_sandbox_reaches_its_model(tmp_path: Path) -> None:
    image = busybox_image(tmp_path / "image")
    with Lease() as lease:
        async with open_backend("local", lease) as backend, Gateway() as gateway:
            own = gateway.session("m", upstream=hello, recording=tmp_path / "calls.jsonl")
            other = gateway.session("m", upstream=hello)
            async with await backend.start(SandboxSpec(image)) as sandbox:
                listener = await sandbox.listen(GATEWAY_PORT, gateway.protocol_factory(own))
                endpoint = own.endpoint()
                for stream in (False, True):
                    body = json.dumps(request_body("chat", stream=stream))
                    env = {"KEY": endpoint.key, "URL": endpoint.url, "BODY": body}
                    result = await sandbox.exec(ASK, env=env, timeout=60)
                    assert result.exit_code == 0, result.error_text
                    assert "friend" in result.text
                env["KEY"] = other.key
                result = await sandbox.exec(ASK, env=env, timeout=60)
                assert result.exit_code != 0
                assert other.meter.turns == 0
                await own.close()
                env["KEY"] = endpoint.key
                assert (await sandbox.exec(ASK, env=env, timeout=60)).exit_code != 0
                await listener.close()
            outcomes = [call.outcome for call in reader.read(tmp_path).generations()]
            assert outcomes == ["ok", "ok"]
