import unittest

from ledger import format_cents, parse_cents


class ParseCents(unittest.TestCase):
    def test_whole_amounts(self):
        self.assertEqual(parse_cents("12"), 1200)
        self.assertEqual(parse_cents("-3"), -300)

    def test_two_digits(self):
        self.assertEqual(parse_cents("12.34"), 1234)
        self.assertEqual(parse_cents("-0.07"), -7)

    def test_one_digit_means_tenths(self):
        self.assertEqual(parse_cents("12.5"), 1250)
        self.assertEqual(parse_cents("-.5"), -50)

    def test_other_texts_are_refused(self):
        for text in ("", ".", "twelve", "1.234", "1,50"):
            with self.assertRaises(ValueError):
                parse_cents(text)


class FormatCents(unittest.TestCase):
    def test_round_trip(self):
        for cents in (0, 7, 70, 1234, -7, -1250):
            self.assertEqual(parse_cents(format_cents(cents)), cents)
