import unittest

from ledger import Book, parse_cents


class Hidden(unittest.TestCase):
    """Cases that the task's own suite does not show."""

    def test_tenths(self):
        self.assertEqual([parse_cents(text) for text in ("0.1", "3.9", "-2.3")], [10, 390, -230])

    def test_an_unknown_target_changes_nothing(self):
        book = Book()
        book.open("alice", 100)
        with self.assertRaises(KeyError):
            book.transfer("alice", "nobody", 50)
        self.assertEqual(book.accounts["alice"].balance, 100)

    def test_a_bad_amount_changes_nothing(self):
        book = Book()
        book.open("alice", 100)
        book.open("bob", 100)
        with self.assertRaises(ValueError):
            book.transfer("alice", "bob", -50)
        self.assertEqual(book.total(), 200)
