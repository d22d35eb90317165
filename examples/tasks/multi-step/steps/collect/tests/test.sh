#!/bin/bash
reward=0
if [ "$(cat /app/failed.txt 2>/dev/null)" = "$(printf '/account\n/cart\n/search')" ]; then
    reward=1
fi
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
