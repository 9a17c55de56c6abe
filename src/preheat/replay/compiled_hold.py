"""One pool of prefixes on arrays, request after request: what `PrefixStore` with `HoldLeaves`
decides, compiled by numba."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from preheat.core.hold_leaves import FIRST_REFRESH
from preheat.replay.compiled_tables import (
    EDGES,
    Floats,
    Ints,
    Table,
    age_bin,
    between,
    jit,
    make_table,
    refresh,
    use_level,
)


class Paths(NamedTuple):
    """All requests' blocks one after the other, numbered from 0; request i's are from `starts[i]`
    to `starts[i + 1]`. `parents` by block, -1 for roots."""

    blocks: Ints
    starts: Ints
    parents: Ints


class Times(NamedTuple):
    """By request: when it began, when its answer was over, the kind known at each; `order` holds the
    requests that `has_end` by their ends. The others' answers are over at once, of the first kind."""

    began_at: Floats
    began_kind: Ints
    ended_at: Floats
    ended_kind: Ints
    order: Ints
    has_end: npt.NDArray[np.bool_]


class HoldOptions(NamedTuple):
    """`HoldLeaves`'s."""

    levels: int = 4
    back_off: float = 100.0
    memory: float = 0.99
    refresh_requests: int = 128
    remembered: int = 65_536


_LEAVES, _RESIDENT, _REQUESTS, _REFRESH_AT, _STEP, _OLDEST, _NEWEST, _GONE, _ENDED = range(9)


class _Pool(NamedTuple):
    """Scalars, leaves with their values, and by block: its place in `leaves` (-1: it isn't one, -2:
    it isn't here), children here, request that used it last (-1: never), count of uses, and place
    in the ring of those gone (-1: it isn't one of them). By request: how many blocks it was the
    last to use, whether it is under way, since when and as what kind it is idle."""

    numbers: Ints
    leaves: Ints
    values: Floats
    place: Ints
    children: Ints
    last: Ints
    uses: Ints
    gone_at: Ints
    gone: Ints
    owned: Ints
    under_way: Ints
    idle_since: Floats
    kind: Ints


def run(
    paths: Paths, times: Times, kinds: int, capacity: int, options: HoldOptions
) -> tuple[Ints, Ints]:
    """Blocks found, by request, and victims in order. Kinds are 0 to `kinds` less one."""
    requests = len(paths.starts) - 1
    hits = np.zeros(requests, np.int64)
    victims = np.zeros(len(paths.blocks), np.int64)
    step = min(FIRST_REFRESH, options.refresh_requests)
    pool = _make_pool(requests, len(paths.parents), len(victims), step)
    table = make_table(kinds * options.levels)
    gone = _loop(paths, times, capacity, options, pool, table, EDGES, hits, victims)
    return hits, victims[:gone]


def _make_pool(requests: int, distinct: int, most_gone: int, step: int) -> _Pool:
    return _Pool(
        numbers=np.array([0, 0, 0, step, step, 0, 0, 0, 0], np.int64),
        leaves=np.zeros(distinct, np.int64),
        values=np.zeros(distinct, np.float64),
        place=np.full(distinct, -2, np.int64),
        children=np.zeros(distinct, np.int64),
        last=np.full(distinct, -1, np.int64),
        uses=np.zeros(distinct, np.int64),
        gone_at=np.full(distinct, -1, np.int64),
        gone=np.zeros(most_gone, np.int64),
        owned=np.zeros(requests, np.int64),
        under_way=np.zeros(requests, np.int64),
        idle_since=np.zeros(requests, np.float64),
        kind=np.zeros(requests, np.int64),
    )


def _worth(
    pool: _Pool, times: Times, table: Table, levels: int, edges: Floats, block: int, now: float
) -> float:
    request = pool.last[block]
    level = use_level(pool.uses[block], levels)
    if pool.under_way[request]:
        row = times.began_kind[request] * levels + level
        return float(table.under_way[row, age_bin(now - times.began_at[request])])
    age = now - pool.idle_since[request]
    row = pool.kind[request] * levels + level
    return float(between(table.value[row], edges, age_bin(age), age))


_worth_of = jit(_worth)


def _end_lives(
    pool: _Pool,
    times: Times,
    table: Table,
    levels: int,
    request: int,
    count: int,
    lives: int,
    used: int,
    now: float,
) -> None:
    """So many blocks, `used` of them again, that this request was the last to use aren't its any more."""
    pool.owned[request] -= lives
    if pool.under_way[request]:
        return
    place = age_bin(now - pool.idle_since[request])
    level = use_level(count, levels)
    kind, began_kind = pool.kind[request], times.began_kind[request]
    for row in (kind * levels + level, began_kind * levels + level):
        table.ends[row, place] += lives
        table.uses[row, place] += used
        if kind == began_kind:
            break


_ended = jit(_end_lives)


def _add_leaf(pool: _Pool, block: int, value: float) -> None:
    count = pool.numbers[_LEAVES]
    pool.leaves[count] = block
    pool.values[count] = value
    pool.place[block] = count
    pool.numbers[_LEAVES] = count + 1


def _drop_leaf(pool: _Pool, block: int, to: int) -> None:
    place = pool.place[block]
    pool.place[block] = to
    pool.numbers[_LEAVES] -= 1
    count = pool.numbers[_LEAVES]
    if place < count:
        moved = pool.leaves[count]
        pool.leaves[place] = moved
        pool.values[place] = pool.values[count]
        pool.place[moved] = place


_leaf_added = jit(_add_leaf)
_leaf_dropped = jit(_drop_leaf)


def _lowest(pool: _Pool, held: int) -> int:
    """The leaf of the smallest value, of the oldest request among equals; never `held`."""
    lowest = -1
    least = 0.0
    for place in range(pool.numbers[_LEAVES]):
        block = pool.leaves[place]
        if block == held:
            continue
        value = pool.values[place]
        is_older = lowest >= 0 and pool.last[block] < pool.last[lowest]
        if lowest < 0 or value < least or (value == least and is_older):
            lowest = block
            least = value
    return lowest


_lowest_of = jit(_lowest)


def _remember(
    pool: _Pool, times: Times, table: Table, options: HoldOptions, block: int, now: float
) -> None:
    """It has left; whoever left longest ago may have to be forgotten for it."""
    numbers = pool.numbers
    pool.gone_at[block] = numbers[_NEWEST]
    pool.gone[numbers[_NEWEST] % len(pool.gone)] = block
    numbers[_NEWEST] += 1
    numbers[_GONE] += 1
    if numbers[_GONE] <= max(options.remembered, 4 * numbers[_RESIDENT]):
        return
    while True:
        at = numbers[_OLDEST]
        oldest = pool.gone[at % len(pool.gone)]
        numbers[_OLDEST] += 1
        if pool.gone_at[oldest] == at:
            break
    pool.gone_at[oldest] = -1
    numbers[_GONE] -= 1
    _ended(pool, times, table, options.levels, pool.last[oldest], pool.uses[oldest], 1, 0, now)
    pool.last[oldest] = -1
    pool.uses[oldest] = 0


_remembered = jit(_remember)


def _use(
    pool: _Pool, paths: Paths, times: Times, table: Table, levels: int, number: int, end: int
) -> None:
    """`HoldLeaves.used`: runs of blocks alike in their past begin new lives together."""
    now = times.began_at[number]
    pool.idle_since[number] = now
    pool.kind[number] = times.began_kind[number]
    run = 0
    past = -1
    past_count = 0
    for place in range(paths.starts[number], end):
        block = paths.blocks[place]
        if pool.last[block] != past or pool.uses[block] != past_count:
            if past >= 0:
                _ended(pool, times, table, levels, past, past_count, run, run, now)
            run = 0
            past = pool.last[block]
            past_count = pool.uses[block]
        run += 1
        pool.last[block] = number
        pool.uses[block] = past_count + 1
        pool.owned[number] += 1
    if past >= 0 and run:
        _ended(pool, times, table, levels, past, past_count, run, run, now)


_used = jit(_use)


def _learn(
    pool: _Pool, times: Times, table: Table, options: HoldOptions, edges: Floats, now: float
) -> None:
    numbers = pool.numbers
    numbers[_STEP] = min(2 * numbers[_STEP], options.refresh_requests)
    numbers[_REFRESH_AT] = numbers[_REQUESTS] + numbers[_STEP]
    table.opened[:] = 0.0
    for block in range(len(pool.last)):
        request = pool.last[block]
        if request >= 0 and not pool.under_way[request]:
            level = use_level(pool.uses[block], options.levels)
            place = age_bin(now - pool.idle_since[request])
            table.opened[pool.kind[request] * options.levels + level, place] += 1.0
            if pool.kind[request] != times.began_kind[request]:
                row = times.began_kind[request] * options.levels + level
                table.opened[row, place] += 1.0
    refresh(table, options.levels, options.back_off, options.memory, edges)


_learned = jit(_learn)


def _end_answers(pool: _Pool, times: Times, table: Table, now: float) -> None:
    """Those that are over by now, in the order of their ends."""
    numbers = pool.numbers
    while numbers[_ENDED] < len(times.order):
        request = times.order[numbers[_ENDED]]
        if times.ended_at[request] > now or request >= numbers[_REQUESTS]:
            return
        numbers[_ENDED] += 1
        if pool.owned[request]:
            ended_at = times.ended_at[request]
            table.over[age_bin(ended_at - times.began_at[request])] += 1.0
            pool.under_way[request] = 0
            pool.idle_since[request] = ended_at
            pool.kind[request] = times.ended_kind[request]


_answers_ended = jit(_end_answers)


def _make_room(
    pool: _Pool,
    paths: Paths,
    times: Times,
    table: Table,
    options: HoldOptions,
    edges: Floats,
    count: int,
    held: int,
    now: float,
    victims: Ints,
    gone: int,
) -> None:
    """`count` leaves leave. Each leaf is looked at once."""
    levels = options.levels
    for place in range(pool.numbers[_LEAVES]):
        pool.values[place] = _worth_of(pool, times, table, levels, edges, pool.leaves[place], now)
    for turn in range(count):
        victim = _lowest_of(pool, held)
        victims[gone + turn] = victim
        _leaf_dropped(pool, victim, -2)
        pool.numbers[_RESIDENT] -= 1
        _remembered(pool, times, table, options, victim, now)
        parent = paths.parents[victim]
        if parent >= 0:
            pool.children[parent] -= 1
            if pool.children[parent] == 0:
                value = _worth_of(pool, times, table, levels, edges, parent, now)
                _leaf_added(pool, parent, value)


_room_made = jit(_make_room)


def _insert(pool: _Pool, paths: Paths, begin: int, end: int) -> None:
    """A path's new blocks come in, root first."""
    for place in range(begin, end):
        block = paths.blocks[place]
        parent = paths.parents[block]
        if parent >= 0:
            if pool.children[parent] == 0:
                _leaf_dropped(pool, parent, -1)
            pool.children[parent] += 1
        if pool.gone_at[block] >= 0:
            pool.gone_at[block] = -1
            pool.numbers[_GONE] -= 1
        _leaf_added(pool, block, 0.0)
    pool.numbers[_RESIDENT] += end - begin


_inserted = jit(_insert)


def _hold(
    paths: Paths,
    times: Times,
    capacity: int,
    options: HoldOptions,
    pool: _Pool,
    table: Table,
    edges: Floats,
    hits: Ints,
    victims: Ints,
) -> int:
    gone = 0
    numbers = pool.numbers
    for number in range(len(hits)):
        now = times.began_at[number]
        _answers_ended(pool, times, table, now)
        begin = paths.starts[number]
        end = paths.starts[number + 1]
        found = begin
        while found < end and pool.place[paths.blocks[found]] >= -1:
            found += 1
        hits[number] = found - begin
        end = min(end, begin + capacity)
        room = end - found - (capacity - numbers[_RESIDENT])
        if room > 0:
            held = paths.blocks[found - 1] if found > begin else -1
            _room_made(pool, paths, times, table, options, edges, room, held, now, victims, gone)
            gone += room
        _inserted(pool, paths, found, end)
        numbers[_REQUESTS] += 1
        _used(pool, paths, times, table, options.levels, number, end)
        if numbers[_REQUESTS] >= numbers[_REFRESH_AT]:
            _learned(pool, times, table, options, edges, now)
        if times.has_end[number]:
            pool.under_way[number] = 1
    return gone


_loop = jit(_hold)
