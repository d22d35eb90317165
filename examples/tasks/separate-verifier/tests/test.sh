#!/bin/bash
python3 -I /tests/grade.py
