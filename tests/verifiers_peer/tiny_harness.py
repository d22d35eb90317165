"""A harness of verifiers 0.4: a program in the runtime that calls the model once and leaves a file."""

from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness

PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": sys.argv[2], "messages": [{"role": "user", "content": sys.argv[3]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["SECRET"], "Content-Type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body, headers)) as answer:
    said = json.loads(answer.read())["choices"][0]["message"]["content"]
open("answer.txt", "w").write(said)
"""


class TinyHarnessConfig(HarnessConfig):
    pass


class TinyHarness(Harness[TinyHarnessConfig]):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        await runtime.write("program.py", PROGRAM.encode())
        argv = ["python3", "program.py", endpoint, ctx.model, data.prompt_text]
        return await runtime.run_program(argv, {"SECRET": secret})


__all__ = ["TinyHarness", "TinyHarnessConfig"]
