"""Streams of keys on arrays: LRU, and J as `HoldValue` decides it, compiled by numba."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from preheat.core.eviction.hold_value import FIRST_REFRESH, LEAST_FOLLOWED, SEED
from preheat.replay.compiled_numbers import numbered
from preheat.replay.compiled_tables import (
    EDGES,
    Floats,
    Ints,
    Table,
    age_bin,
    between,
    fade,
    jit,
    make_table,
    refresh,
    use_level,
)

_MASK: Final = 0xFFFFFFFF
_RANDOM, _CHANCE, _OPEN, _SIZE, _LEFT, _STEP = range(6)  # places in `_Keys.numbers`


class HoldOptions(NamedTuple):
    """`HoldValue`'s."""

    candidates: int = 32
    levels: int = 4
    back_off: float = 100.0
    memory: float = 0.99
    refresh_uses: int = 1_024
    followed: int = 2_048


class _Keys(NamedTuple):
    """`HoldValue`'s state. By key: its place in `held`, uses and last use; of the life that is
    followed the row (or -1), beginning, the same in refreshes, draw, and place in `lives`."""

    numbers: Ints
    held: Ints
    place: Ints
    uses: Ints
    used_at: Ints
    life_row: Ints
    life_at: Ints
    life_began: Ints
    life_draw: Ints
    life_place: Ints
    lives: Ints


def run(
    order: Literal["lru", "j"],
    keys: Sequence[int],
    capacity: int,
    options: HoldOptions | None = None,
) -> tuple[bytes, list[int]]:
    """Hits, one byte a request, and victims in order; entries have one size, cost and kind, and
    `now` is the request's number."""
    names, numbers = numbered(np.asarray(keys, np.int64))
    hits = np.zeros(len(numbers), np.uint8)
    victims = np.empty(len(numbers), np.int64)
    if order == "lru":
        gone = _lru_loop(numbers, len(names), capacity, hits, victims)
    else:
        chosen = options or HoldOptions()
        state = _make_keys(len(names), capacity, min(FIRST_REFRESH, chosen.refresh_uses))
        table = make_table(chosen.levels, chosen.memory)
        gone = _hold_loop(numbers, capacity, chosen, state, table, EDGES, hits, victims)
    return hits.tobytes(), names[victims[:gone]].tolist()


def _lru(
    keys: Ints, distinct: int, capacity: int, hits: npt.NDArray[np.uint8], victims: Ints
) -> int:
    """A ring of keys, oldest first; slot `distinct` is where it begins and ends."""
    newer = np.full(distinct + 1, -1, np.int64)
    older = np.full(distinct + 1, -1, np.int64)
    newer[distinct] = older[distinct] = distinct
    held = gone = 0
    for number in range(len(keys)):
        key = keys[number]
        if newer[key] >= 0:
            hits[number] = 1
            newer[older[key]] = newer[key]
            older[newer[key]] = older[key]
        elif held < capacity:
            held += 1
        elif capacity == 0:
            continue
        else:
            victim = newer[distinct]
            newer[distinct] = newer[victim]
            older[newer[victim]] = distinct
            newer[victim] = -1
            victims[gone] = victim
            gone += 1
        last = older[distinct]
        newer[last] = key
        older[key] = last
        newer[key] = distinct
        older[distinct] = key
    return gone


_lru_loop = jit(_lru)


def _make_keys(distinct: int, capacity: int, step: int) -> _Keys:
    none = np.full(distinct, -1, np.int64)
    return _Keys(
        np.array([SEED, 0, 0, 0, step, step], np.int64),
        np.zeros(min(capacity, distinct), np.int64),
        place=none.copy(),
        uses=np.zeros(distinct, np.int64),
        used_at=np.zeros(distinct, np.int64),
        life_row=none,
        life_at=np.zeros(distinct, np.int64),
        life_began=np.zeros(distinct, np.int64),
        life_draw=np.zeros(distinct, np.int64),
        life_place=np.zeros(distinct, np.int64),
        lives=np.zeros(distinct, np.int64),
    )


def _draw(numbers: Ints) -> int:
    x = numbers[_RANDOM]
    x ^= (x << 13) & _MASK
    x ^= x >> 17
    x ^= (x << 5) & _MASK
    numbers[_RANDOM] = x
    return int(x)


_drawn = jit(_draw)


def _lowest(state: _Keys, table: Table, options: HoldOptions, edges: Floats, now: int) -> int:
    size = state.numbers[_SIZE]
    draws = size > options.candidates
    lowest = -1
    least = 0.0
    for one in range(options.candidates if draws else size):
        other = state.held[_drawn(state.numbers) % size if draws else one]
        age = float(now - state.used_at[other])
        row = use_level(state.uses[other], options.levels)
        value = between(table.value[row], edges, age_bin(age), age)
        is_older = lowest >= 0 and state.used_at[other] < state.used_at[lowest]
        if lowest < 0 or value < least or (value == least and is_older):
            lowest = other
            least = value
    return lowest


_lowest_of = jit(_lowest)


def _remove(state: _Keys, key: int) -> None:
    state.numbers[_SIZE] -= 1
    size = state.numbers[_SIZE]
    place = state.place[key]
    state.place[key] = -1
    if place < size:
        last = state.held[size]
        state.held[place] = last
        state.place[last] = place


_removed = jit(_remove)


def _follow(state: _Keys, options: HoldOptions, key: int, now: int, draw: int) -> None:
    """A life begins that is followed; if there are too many then, half of them aren't any more."""
    numbers, lives = state.numbers, state.lives
    state.life_row[key] = use_level(state.uses[key], options.levels)
    state.life_at[key] = now
    state.life_draw[key] = draw
    state.life_place[key] = numbers[_OPEN]
    lives[numbers[_OPEN]] = key
    numbers[_OPEN] += 1
    while numbers[_OPEN] > max(LEAST_FOLLOWED, min(options.followed, 8 * numbers[_SIZE])):
        numbers[_CHANCE] = 2 * numbers[_CHANCE] + 1
        kept = 0
        for one in range(numbers[_OPEN]):
            other = lives[one]
            if state.life_draw[other] & numbers[_CHANCE]:
                state.life_row[other] = -1
            else:
                state.life_place[other] = kept
                lives[kept] = other
                kept += 1
        numbers[_OPEN] = kept


_followed = jit(_follow)


def _learn(state: _Keys, table: Table, options: HoldOptions, edges: Floats, now: int) -> None:
    numbers = state.numbers
    numbers[_STEP] = min(2 * numbers[_STEP], options.refresh_uses)
    numbers[_LEFT] = numbers[_STEP]
    table.opened[:] = 0.0
    for one in range(numbers[_OPEN]):
        key = state.lives[one]
        place = age_bin(float(now - state.life_at[key]))
        weight = fade(table.fades, table.refreshes[0] - state.life_began[key])
        table.opened[state.life_row[key], place] += weight
    refresh(table, options.levels, options.back_off, options.memory, edges)
    if 4 * numbers[_OPEN] < max(LEAST_FOLLOWED, min(options.followed, 8 * numbers[_SIZE])):
        numbers[_CHANCE] >>= 1


_learned = jit(_learn)


def _begin(
    state: _Keys, table: Table, options: HoldOptions, edges: Floats, key: int, now: int
) -> None:
    """A use: the life before it ends, and a new one begins."""
    numbers = state.numbers
    state.used_at[key] = now
    row = state.life_row[key]
    if row >= 0:
        place = age_bin(float(now - state.life_at[key]))
        weight = fade(table.fades, table.refreshes[0] - state.life_began[key])
        table.ends[row, place] += weight
        table.uses[row, place] += weight
        state.life_row[key] = -1
        numbers[_OPEN] -= 1
        last = state.lives[numbers[_OPEN]]
        state.lives[state.life_place[key]] = last
        state.life_place[last] = state.life_place[key]
    draw = _drawn(numbers)
    if draw & numbers[_CHANCE] == 0:
        state.life_began[key] = table.refreshes[0]
        _followed(state, options, key, now, draw)
    numbers[_LEFT] -= 1
    if numbers[_LEFT] == 0:
        _learned(state, table, options, edges, now)


_begun = jit(_begin)


def _hold(
    keys: Ints,
    capacity: int,
    options: HoldOptions,
    state: _Keys,
    table: Table,
    edges: Floats,
    hits: npt.NDArray[np.uint8],
    victims: Ints,
) -> int:
    gone = 0
    for now in range(len(keys)):
        key = keys[now]
        if state.place[key] >= 0:
            hits[now] = 1
            state.uses[key] += 1
        elif capacity == 0:
            continue
        else:
            if state.numbers[_SIZE] == capacity:
                victims[gone] = _lowest_of(state, table, options, edges, now)
                _removed(state, victims[gone])
                gone += 1
            size = state.numbers[_SIZE]
            state.place[key] = size
            state.held[size] = key
            state.numbers[_SIZE] = size + 1
            state.uses[key] = 1
        _begun(state, table, options, edges, key, now)
    return gone


_hold_loop = jit(_hold)
