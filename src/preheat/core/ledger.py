"""What was spent and saved, by layer, tenant and provenance; it balances to a residual of zero.

Money is a whole number of picodollars and time a whole number of nanoseconds, so that sums are
exact: paid + saved by us + saved by the provider = the price without us + what we spent on warm-ups, to
the last unit.
(A "dollar" is whatever currency the operator's prices are in.)
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from preheat.core.types import Usage
from preheat.core.warmup.found import NOTHING_FOUND, Found

PICO: Final = 10**12
NANO: Final = 10**9
_ACCOUNTS: Final = 4_096
_NAME_CHARACTERS: Final = 128
_OTHER: Final = "(other)"

Layer = Literal["exact", "join", "forward", "refresh", "warm"]


class Price(msgspec.Struct, frozen=True):
    """Picodollars per token. A price per million tokens of 0.15 is 150,000 picodollars a token."""

    input: int = 0
    cached_input: int = 0
    output: int = 0

    @classmethod
    def per_million(cls, input: float, cached_input: float, output: float) -> "Price":
        """From prices per million tokens, as providers publish them."""
        return cls(*(round(price * PICO / 10**6) for price in (input, cached_input, output)))

    def gross(self, usage: Usage) -> int:
        """The list price: what the tokens cost where nobody caches anything."""
        return usage.input_tokens * self.input + usage.output_tokens * self.output

    def net(self, usage: Usage) -> int:
        """What the provider asks, its own prompt cache taken into account."""
        fresh_tokens = usage.input_tokens - usage.cached_tokens
        return (
            fresh_tokens * self.input
            + usage.cached_tokens * self.cached_input
            + usage.output_tokens * self.output
        )

    def discount(self, usage: Usage) -> int:
        """What the provider's prompt cache took off."""
        return usage.cached_tokens * (self.input - self.cached_input)


class Account(msgspec.Struct, gc=False):
    """The sums of one (tenant, model, layer, reason).

    `unpriced` counts answers whose engine reported no usage: they are in no sum of money.
    Seconds saved are the measured service seconds of the stored answer, or of the warm-up
    (`basis=measured`). `spent_by_us` is what of `paid` our own warm-ups cost, `warmed_tokens` what of
    `cached_tokens` they had put there for whoever came first.
    """

    requests: int = 0
    unpriced: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    warmed_tokens: int = 0
    paid: int = 0
    spent_by_us: int = 0
    saved_by_us: int = 0
    saved_by_provider: int = 0
    price_without_us: int = 0
    paid_ns: int = 0
    saved_by_us_ns: int = 0

    @property
    def residual(self) -> int:
        """What the books can't explain; always 0."""
        without_us = self.price_without_us + self.spent_by_us
        return without_us - self.paid - self.saved_by_us - self.saved_by_provider

    def save(self, share: "Share", times: int = 1) -> None:
        """An answer was had without an engine."""
        self.requests += times
        self.saved_by_us_ns += share.saved_by_us_ns * times
        if share.unpriced:
            self.unpriced += times
            return
        self.input_tokens += share.input_tokens * times
        self.output_tokens += share.output_tokens * times
        self.saved_by_us += share.saved_by_us * times
        self.price_without_us += share.price_without_us * times
        if share.cached_tokens:
            self.cached_tokens += share.cached_tokens * times
            self.saved_by_provider += share.saved_by_provider * times

    def add(self, other: "Account") -> None:
        """Add the other account's sums to these."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Share(msgspec.Struct, frozen=True, gc=False):
    """What one use of a stored answer adds to an account; worked out when it is stored."""

    unpriced: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    saved_by_us: int
    saved_by_provider: int
    price_without_us: int
    saved_by_us_ns: int


AccountName = tuple[str, str, str, str]
"""(tenant, model, layer, reason)"""


class Ledger:
    """The accounts. Clients choose the models' names, so their number and length are bounded."""

    def __init__(self, prices: Mapping[str, Price]) -> None:
        self._prices = prices
        self._accounts: dict[AccountName, Account] = {}

    def reprice(self, prices: Mapping[str, Price]) -> None:
        """From now on tokens cost this; what is booked stays booked."""
        self._prices = prices

    def price(self, model: str) -> Price:
        """The price of a model's tokens; nothing where the operator set none."""
        return self._prices.get(model, _FREE)

    def book_forward(
        self,
        tenant: str,
        model: str,
        reason: str,
        usage: Usage | None,
        service_s: float,
        *,
        is_refresh: bool = False,
        warmed: Found = NOTHING_FOUND,
    ) -> None:
        """An engine computed an answer, for a client or to refresh one that was told already. What of its
        prompt it had because of us (`warmed`) is saved by us."""
        account = self.account(tenant, model, "refresh" if is_refresh else "forward", reason)
        account.requests += 1
        account.paid_ns += round(service_s * NANO)
        if usage is None:
            account.unpriced += 1
            return
        price = self.price(model)
        _count_tokens(account, usage)
        ours = price.discount(Usage(usage.input_tokens, 0, min(warmed.tokens, usage.cached_tokens)))
        account.warmed_tokens += warmed.tokens
        account.paid += price.net(usage)
        account.saved_by_us += ours
        account.saved_by_us_ns += round(warmed.took_s * NANO)
        account.saved_by_provider += price.discount(usage) - ours
        account.price_without_us += price.gross(usage)

    def book_warm(
        self, tenant: str, model: str, reason: str, computed_tokens: int, took_s: float
    ) -> None:
        """An engine computed so many tokens of a prefix because we wanted it warm: without us nobody
        would have asked."""
        account = self.account(tenant, model, "warm", reason)
        account.requests += 1
        account.input_tokens += computed_tokens
        account.paid_ns += round(took_s * NANO)
        spent = self.price(model).net(Usage(computed_tokens, 0))
        account.paid += spent
        account.spent_by_us += spent

    def share_of(self, model: str, usage: Usage | None, service_s: float) -> Share:
        """What one more use of an answer saves.

        We save what its first asking cost. What the provider's own cache took off then it
        would take off again: that stays the provider's.
        """
        saved_ns = round(service_s * NANO)
        if usage is None:
            return Share(1, 0, 0, 0, 0, 0, 0, saved_ns)
        price = self.price(model)
        return Share(
            unpriced=0,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            saved_by_us=price.net(usage),
            saved_by_provider=price.discount(usage),
            price_without_us=price.gross(usage),
            saved_by_us_ns=saved_ns,
        )

    def account(self, tenant: str, model: str, layer: Layer, reason: str) -> Account:
        """The account of that name, opened where there is none yet."""
        name = (tenant, model, layer, reason)
        account = self._accounts.get(name)
        if account is None:
            is_flood = len(self._accounts) >= _ACCOUNTS or len(model) > _NAME_CHARACTERS
            if is_flood and model not in self._prices:
                name = (tenant, _OTHER, layer, reason)
            account = self._accounts.setdefault(name, Account())
        return account

    def accounts(self) -> Iterator[tuple[AccountName, Account]]:
        """Every account with its name."""
        return iter(self._accounts.items())


def _count_tokens(account: Account, usage: Usage) -> None:
    account.input_tokens += usage.input_tokens
    account.output_tokens += usage.output_tokens
    account.cached_tokens += usage.cached_tokens


_FREE: Final = Price()
