#!/bin/bash
python3 -I - <<'PYTHON'
import json

try:
    with open("/app/summary.json") as stream:
        right = json.load(stream) == {"/account": 1, "/cart": 2, "/search": 1}
except (OSError, ValueError):
    right = False
with open("/logs/verifier/reward.json", "w") as stream:
    json.dump({"reward": int(right)}, stream)
PYTHON
