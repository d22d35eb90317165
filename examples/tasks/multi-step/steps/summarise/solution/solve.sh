#!/bin/bash
cd /app && python3 - <<'PYTHON'
import json
from collections import Counter
from pathlib import Path

lines = [line.split() for log in sorted(Path("logs").glob("*.log")) for line in log.read_text().splitlines()]
failed = Counter(path for _, _, path, status in lines if int(status) >= 500)
wanted = Path("failed.txt").read_text().split()
Path("summary.json").write_text(json.dumps({path: failed[path] for path in wanted}))
PYTHON
