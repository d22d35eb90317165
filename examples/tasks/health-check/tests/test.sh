#!/bin/bash
reward=0
if [ "$(tr -d '[:space:]' < /app/value.txt 2>/dev/null)" = "18050" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
