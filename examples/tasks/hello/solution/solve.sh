#!/bin/bash
echo "Hello, pier!" > /app/greeting.txt
