#!/bin/bash
reward=0
if [ "$(cat /app/greeting.txt 2>/dev/null)" = "Hello, pier!" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
