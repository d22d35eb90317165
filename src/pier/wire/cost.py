"""What a turn cost: as the provider reported it, else from the price table, else unknown. Never a guess."""

from __future__ import annotations

from pier.wire.turn import Usage

PRICE_IDS = {"google": "google", "anthropic": "anthropic", "openai": "openai", "openrouter": "openrouter"}


def cost_of(usage: Usage | None, model: str | None, provider: str) -> float | None:
    """US dollars, or None if unknown."""
    if usage is None:
        return None
    if usage.cost_usd is not None:
        return usage.cost_usd
    if model is None or usage.input_tokens is None or usage.output_tokens is None or provider not in PRICE_IDS:
        return None
    return _from_table(usage, model, PRICE_IDS[provider])


def is_priced(model: str, provider: str) -> bool:
    """Whether the price table knows this model, or the provider reports money itself."""
    return provider == "openrouter" or cost_of(Usage(1, 1), model, provider) is not None


def _from_table(usage: Usage, model: str, provider: str) -> float | None:
    import genai_prices

    counts = genai_prices.Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    try:
        return float(genai_prices.calc_price(counts, model, provider_id=provider).total_price)
    except (LookupError, ValueError):
        return None
