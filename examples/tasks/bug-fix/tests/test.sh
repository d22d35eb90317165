#!/bin/bash
# The package is the agent's, the tests are ours: they run against a copy in which only the package is taken over.
work=$(mktemp -d)
cp -r /app/ledger "$work/ledger"
cp -r /tests/suite "$work/suite"
cd "$work" || exit 1
if python3 -I -c '
import sys, unittest
sys.path.insert(0, ".")
sys.dont_write_bytecode = True
suite = unittest.defaultTestLoader.discover("suite", top_level_dir=".")
result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
sys.exit(not (result.wasSuccessful() and result.testsRun >= 11))
'; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
