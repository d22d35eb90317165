import unittest

from ledger import Book, InsufficientFunds


class Transfers(unittest.TestCase):
    def setUp(self):
        self.book = Book()
        self.book.open("alice", 1000)
        self.book.open("bob", 200)

    def test_money_moves(self):
        self.book.transfer("alice", "bob", 300)
        self.assertEqual(self.book.accounts["alice"].balance, 700)
        self.assertEqual(self.book.accounts["bob"].balance, 500)

    def test_a_failed_transfer_changes_nothing(self):
        with self.assertRaises(InsufficientFunds):
            self.book.transfer("bob", "alice", 500)
        self.assertEqual(self.book.accounts["alice"].balance, 1000)
        self.assertEqual(self.book.accounts["bob"].balance, 200)
        self.assertEqual(self.book.total(), 1200)

    def test_an_account_may_be_emptied(self):
        self.book.transfer("bob", "alice", 200)
        self.assertEqual(self.book.accounts["bob"].balance, 0)
