#!/bin/bash
python3 - <<'PYTHON'
import json
import os
from urllib.request import urlopen

with urlopen(f"http://127.0.0.1:{os.environ['SHOP_PORT']}/items") as response:
    items = json.load(response)
with open("/app/value.txt", "w") as stream:
    print(sum(item["price"] * item["stock"] for item in items), file=stream)
PYTHON
