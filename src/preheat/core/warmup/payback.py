"""Whether warming a prefix pays: the warm-up inequality."""

from math import exp

import msgspec


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that could be warmed at `copies` workers by one computation.

        warm  ⇔  copies · chance · price_then · saves_s  >  price_now · costs_s + room_s

    A warm-up takes away only the first miss of each copy, so `saves_s` is what that would cost (less
    what loading costs), and `chance` that it comes before the copy is pushed out. `costs_s` is what
    computing takes now. Prices are of a second of the engine's; only their ratio counts. `room_s` is
    what the room would be worth to others meanwhile (μ · b · E[hold]), in seconds.

    >>> Offer(chance=0.9, saves_s=2.0, costs_s=2.0).pays  # at equal prices it can't
    False
    >>> Offer(chance=0.9, saves_s=2.0, costs_s=2.0, price_now=0.3).pays
    True
    """

    copies: int = 1
    chance: float
    saves_s: float
    costs_s: float
    price_then: float = 1.0
    price_now: float = 1.0
    room_s: float = 0.0

    @property
    def gains_s(self) -> float:
        """Expected, in seconds of the engine's at the price of then 1."""
        return self.copies * self.chance * self.price_then * self.saves_s

    @property
    def spends_s(self) -> float:
        """In the same seconds."""
        return self.price_now * self.costs_s + self.room_s

    @property
    def pays(self) -> bool:
        return self.gains_s > self.spends_s


def chance_of_use(uses_per_s: float, hold_s: float) -> float:
    """That something is used within the time for which it stays, if uses come at random.

    >>> chance_of_use(0.0, 100.0), round(chance_of_use(0.01, 100.0), 3)
    (0.0, 0.632)
    """
    return 1.0 - exp(-uses_per_s * hold_s)
