"""A ledger of accounts in whole cents."""

from ledger.account import Account, InsufficientFunds
from ledger.book import Book
from ledger.money import format_cents, parse_cents

__all__ = ["Account", "Book", "InsufficientFunds", "format_cents", "parse_cents"]
