"""Put a gateway in front of an agent and read its model calls: python examples/python/gateway_before_an_agent.py

The agent is a few lines of Python in a sandbox without a network. The model is a Python function. To use a provider
or a script instead, replace `upstream` with a name such as `openai/gpt-5` or `script:FILE`.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pier

AGENT = """
import json, os, urllib.request
body = {"model": "any", "messages": [{"role": "user", "content": "What is six times seven?"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    print("the agent read:", json.load(answer)["choices"][0]["message"]["content"])
"""


async def model(request: Any) -> str:
    """A model is a function from a request to the text of the answer."""
    return f"After {len(request.messages)} message: forty-two."


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        recording = Path(directory) / "calls.jsonl"
        async with pier.Gateway() as gateway, pier.sandbox("host", workdir="/w") as box:
            budget = pier.Budget(turns=10)
            async with gateway.session("demo", upstream=model, budget=budget, recording=recording) as session:
                endpoint = session.endpoint()
                await box.listen(pier.GATEWAY_PORT, gateway.protocol_factory(session))
                env = {"OPENAI_BASE_URL": f"{endpoint.url}/v1", "OPENAI_API_KEY": endpoint.key}
                result = await box.exec(["python3", "-c", AGENT], env=env, timeout=60)
                print(result.text or result.error_text, end="")
        for call in pier.read_recording(recording).generations():
            print(f"call {call.number}: {call.dialect}, {call.outcome}, {len(call.body)} bytes asked")


if __name__ == "__main__":
    asyncio.run(main())
