"""A command agent for tests: asks its model in Chat Completions, runs `bash` calls, and ends when there are none."""

from __future__ import annotations

from pathlib import Path

SOURCE = r"""#!/usr/bin/env python3
import json, os, subprocess, sys, urllib.error, urllib.request

url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
with open(os.environ["PIER_INSTRUCTION_FILE"]) as stream:
    messages = [{"role": "user", "content": stream.read()}]
schema = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "bash", "parameters": schema}}]
while True:
    body = json.dumps({"model": "m", "messages": messages, "tools": tools, "temperature": 0}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json", "User-Agent": "bash-agent/1"}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers))
    except urllib.error.HTTPError as error:
        print("refused:", error.code, error.read().decode(), flush=True)
        sys.exit(3)
    message = json.load(answer)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": ran.stdout + ran.stderr})
"""


def bash_agent(directory: Path) -> str:
    """The agent's script, below `directory`."""
    path = directory / "agent.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SOURCE)
    return str(path)
