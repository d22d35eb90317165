#!/bin/bash
set -e
cd /app
python3 - <<'PYTHON'
from pathlib import Path

money = Path("ledger/money.py")
money.write_text(money.read_text().replace('int(fraction or "0")', 'int(fraction.ljust(2, "0"))'))

book = Path("ledger/book.py")
deposit = "        self.accounts[target].deposit(cents)\n"
withdraw = "        self.accounts[source].withdraw(cents)\n"
check = "        target_account = self.accounts[target]\n"
book.write_text(book.read_text().replace(deposit + withdraw, check + withdraw + "        target_account.deposit(cents)\n"))
PYTHON
