#!/bin/bash
python3 - <<'PYTHON'
import json

primes = [n for n in range(2, 200) if all(n % d for d in range(2, int(n**0.5) + 1))]
pairs = [[p, p + 2] for p in primes if p + 2 in primes]
with open("/app/answer.json", "w") as stream:
    json.dump(pairs, stream)
PYTHON
