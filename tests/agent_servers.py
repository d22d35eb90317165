"""Servers for a fake internet (`tests.world`): registries to install small agents from, and a model provider."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import ExitStack
from pathlib import Path

from pier.gateway.script import Script
from pier.gateway.server import Gateway
from tests import npm_registry, pypi_index

NPM, PYPI, PROVIDER = 4873, 4874, 4875
"""The ports of the servers."""
KEY_FILE = "PIER_TEST_KEY_FILE"
TURNS = [{"shell": "echo done > done.txt"}, {"finish": "It is done."}]
"""What the provider's model does, for whoever asks it."""

JS = """
const base = process.env.OPENAI_BASE_URL, key = process.env.OPENAI_API_KEY;
const body = JSON.stringify({model: "m", messages: [{role: "user", content: process.argv[2]}]});
const headers = {"content-type": "application/json", authorization: "Bearer " + key};
fetch(base + "/chat/completions", {method: "POST", body, headers}).then(async (answer) => {
  console.log((await answer.json()).choices[0].message.content);
  require("fs").writeFileSync("done", "");
  await fetch(process.env.npm_config_registry).then(() => process.exit(3), () => console.log("closed"));
});
"""
PY = """
import json, os, pathlib, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"])
pathlib.Path("done").touch()
try:
    urllib.request.urlopen(os.environ["PIP_INDEX_URL"], timeout=30)
except OSError:
    print("closed")
else:
    sys.exit(3)
"""

_open = ExitStack()


def registries(names: dict[str, str]) -> None:
    """A registry of npm's kind and an index of PyPI's, each with one agent."""
    names |= {"npm.test": "93.184.216.41", "pypi.test": "93.184.216.42"}
    registry = _open.enter_context(npm_registry.serve("", NPM, "npm.test"))
    registry.add("tiny-agent", "1.4.2", {"cli.js": (JS.encode(), 0o644)})
    index = _open.enter_context(pypi_index.serve("", PYPI, "pypi.test"))
    index.add("tiny-agent", "1.4.2", {"tiny_agent.py": PY})


def provider(names: dict[str, str]) -> None:
    """A model provider that speaks every dialect and follows `TURNS`; its key is put into the file that `KEY_FILE`
    names."""
    names["provider.test"] = "93.184.216.43"
    ready = threading.Event()

    async def run() -> None:
        async with Gateway() as gateway:
            session = gateway.session("own-model", upstream=Script.parse(TURNS))
            Path(os.environ[KEY_FILE]).write_text(session.key)
            await gateway.serve("", PROVIDER, session)
            ready.set()
            await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    assert ready.wait(60)
