#!/usr/bin/env python3
"""The agent: asks its model three times for a word and writes each one to /tmp/answer.

The prompt is the whole conversation, so each prompt continues the tokens that were sampled before.
"""

import json
import os
import urllib.request

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
HEADERS = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}

messages = [{"role": "user", "content": "count"}]
for _ in range(3):
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(URL, body, HEADERS)) as answer:
        word = json.load(answer)["choices"][0]["message"]["content"]
    with open("/tmp/answer", "a") as file:
        print(word, file=file)
    messages += [{"role": "assistant", "content": word}, {"role": "user", "content": "next"}]
