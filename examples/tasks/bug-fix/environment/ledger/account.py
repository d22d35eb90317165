"""One account and its balance."""


class InsufficientFunds(Exception):
    """More was to be taken than the account holds."""


class Account:
    """An account that cannot go below its limit (zero unless said otherwise)."""

    def __init__(self, name, balance=0, limit=0):
        self.name = name
        self.balance = balance
        self.limit = limit

    def deposit(self, cents):
        if cents <= 0:
            raise ValueError("a deposit must be positive")
        self.balance += cents

    def withdraw(self, cents):
        if cents <= 0:
            raise ValueError("a withdrawal must be positive")
        if self.balance - cents < self.limit:
            raise InsufficientFunds(f"{self.name} holds {self.balance}, {cents} is too much")
        self.balance -= cents
