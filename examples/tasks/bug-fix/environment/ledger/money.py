"""Amounts of money as whole cents, so that nothing is lost to rounding."""


def parse_cents(text):
    """Read an amount such as `12`, `12.5`, `12.50` or `-0.07`."""
    text = text.strip()
    sign = -1 if text.startswith("-") else 1
    whole, _, fraction = text.lstrip("+-").partition(".")
    if not (whole or fraction) or not (whole + fraction).isdigit() or len(fraction) > 2:
        raise ValueError(f"not an amount: {text!r}")
    return sign * (int(whole or "0") * 100 + int(fraction or "0"))


def format_cents(cents):
    """Write an amount with two digits after the point."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"
