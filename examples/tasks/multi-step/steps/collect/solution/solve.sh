#!/bin/bash
cat /app/logs/*.log | awk '$4 >= 500 { print $3 }' | sort -u > /app/failed.txt
