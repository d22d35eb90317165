"""All accounts together."""

from ledger.account import Account


class Book:
    """Accounts by name. Money moves between them and is never made or lost."""

    def __init__(self):
        self.accounts = {}

    def open(self, name, balance=0, limit=0):
        if name in self.accounts:
            raise ValueError(f"there is an account {name!r} already")
        self.accounts[name] = Account(name, balance, limit)
        return self.accounts[name]

    def transfer(self, source, target, cents):
        """Move money; either both accounts change or neither does."""
        self.accounts[target].deposit(cents)
        self.accounts[source].withdraw(cents)

    def total(self):
        return sum(account.balance for account in self.accounts.values())
