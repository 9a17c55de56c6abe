"""The arrays of one pool of prefixes under J: its leaves, and the lives of its blocks."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from preheat.replay.compiled_tables import (
    Floats,
    Ints,
    Table,
    age_bin,
    between,
    fade,
    jit,
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


LEAVES, RESIDENT, REQUESTS, REFRESH_AT, STEP, OLDEST, NEWEST, GONE, ENDED = range(9)


class Pool(NamedTuple):
    """Scalars, leaves with their values, and by block: its place in `leaves` (-1: it isn't one, -2:
    it isn't here), children here, request that used it last (-1: never), count of uses, and place
    in the ring of those gone (-1: it isn't one of them). By request: how many blocks it was the
    last to use, whether it is under way, since when (also in
    refreshes, `began`) and as what kind it is idle."""

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
    began: Ints
    kind: Ints


def make_pool(requests: int, distinct: int, most_gone: int, step: int) -> Pool:
    return Pool(
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
        began=np.zeros(requests, np.int64),
        kind=np.zeros(requests, np.int64),
    )


def _worth(
    pool: Pool, times: Times, table: Table, levels: int, edges: Floats, block: int, now: float
) -> float:
    request = pool.last[block]
    level = use_level(pool.uses[block], levels)
    if pool.under_way[request]:
        row = times.began_kind[request] * levels + level
        return float(table.under_way[row, age_bin(now - times.began_at[request])])
    age = now - pool.idle_since[request]
    row = pool.kind[request] * levels + level
    return float(between(table.value[row], edges, age_bin(age), age))


worth_of = jit(_worth)


def _end_lives(
    pool: Pool,
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
    weight = fade(table.fades, table.refreshes[0] - pool.began[request])
    level = use_level(count, levels)
    kind, began_kind = pool.kind[request], times.began_kind[request]
    for row in (kind * levels + level, began_kind * levels + level):
        table.ends[row, place] += lives * weight
        table.uses[row, place] += used * weight
        if kind == began_kind:
            break


lives_ended = jit(_end_lives)


def _add_leaf(pool: Pool, block: int, value: float) -> None:
    count = pool.numbers[LEAVES]
    pool.leaves[count] = block
    pool.values[count] = value
    pool.place[block] = count
    pool.numbers[LEAVES] = count + 1


def _drop_leaf(pool: Pool, block: int, to: int) -> None:
    place = pool.place[block]
    pool.place[block] = to
    pool.numbers[LEAVES] -= 1
    count = pool.numbers[LEAVES]
    if place < count:
        moved = pool.leaves[count]
        pool.leaves[place] = moved
        pool.values[place] = pool.values[count]
        pool.place[moved] = place


leaf_added = jit(_add_leaf)
leaf_dropped = jit(_drop_leaf)


def _remember(
    pool: Pool, times: Times, table: Table, options: HoldOptions, block: int, now: float
) -> None:
    """It has left; whoever left longest ago may have to be forgotten for it."""
    numbers = pool.numbers
    pool.gone_at[block] = numbers[NEWEST]
    pool.gone[numbers[NEWEST] % len(pool.gone)] = block
    numbers[NEWEST] += 1
    numbers[GONE] += 1
    if numbers[GONE] <= max(options.remembered, 4 * numbers[RESIDENT]):
        return
    while True:
        at = numbers[OLDEST]
        oldest = pool.gone[at % len(pool.gone)]
        numbers[OLDEST] += 1
        if pool.gone_at[oldest] == at:
            break
    pool.gone_at[oldest] = -1
    numbers[GONE] -= 1
    lives_ended(pool, times, table, options.levels, pool.last[oldest], pool.uses[oldest], 1, 0, now)
    pool.last[oldest] = -1
    pool.uses[oldest] = 0


left = jit(_remember)


def _use(
    pool: Pool, paths: Paths, times: Times, table: Table, levels: int, number: int, end: int
) -> None:
    """`HoldLeaves.used`: runs of blocks alike in their past begin new lives together."""
    now = times.began_at[number]
    pool.idle_since[number] = now
    pool.began[number] = table.refreshes[0]
    pool.kind[number] = times.began_kind[number]
    run = 0
    past = -1
    past_count = 0
    for place in range(paths.starts[number], end):
        block = paths.blocks[place]
        if pool.last[block] != past or pool.uses[block] != past_count:
            if past >= 0:
                lives_ended(pool, times, table, levels, past, past_count, run, run, now)
            run = 0
            past = pool.last[block]
            past_count = pool.uses[block]
        run += 1
        pool.last[block] = number
        pool.uses[block] = past_count + 1
        pool.owned[number] += 1
    if past >= 0 and run:
        lives_ended(pool, times, table, levels, past, past_count, run, run, now)


used = jit(_use)


def _learn(
    pool: Pool, times: Times, table: Table, options: HoldOptions, edges: Floats, now: float
) -> None:
    numbers = pool.numbers
    numbers[STEP] = min(2 * numbers[STEP], options.refresh_requests)
    numbers[REFRESH_AT] = numbers[REQUESTS] + numbers[STEP]
    table.opened[:] = 0.0
    for block in range(len(pool.last)):
        request = pool.last[block]
        if request >= 0 and not pool.under_way[request]:
            level = use_level(pool.uses[block], options.levels)
            place = age_bin(now - pool.idle_since[request])
            weight = fade(table.fades, table.refreshes[0] - pool.began[request])
            table.opened[pool.kind[request] * options.levels + level, place] += weight
            if pool.kind[request] != times.began_kind[request]:
                row = times.began_kind[request] * options.levels + level
                table.opened[row, place] += weight
    refresh(table, options.levels, options.back_off, options.memory, edges)


learned = jit(_learn)


def _end_answers(pool: Pool, times: Times, table: Table, now: float) -> None:
    """Those that are over by now, in the order of their ends."""
    numbers = pool.numbers
    while numbers[ENDED] < len(times.order):
        request = times.order[numbers[ENDED]]
        if times.ended_at[request] > now or request >= numbers[REQUESTS]:
            return
        numbers[ENDED] += 1
        if pool.owned[request]:
            ended_at = times.ended_at[request]
            table.over[age_bin(ended_at - times.began_at[request])] += 1.0
            pool.under_way[request] = 0
            pool.idle_since[request] = ended_at
            pool.began[request] = table.refreshes[0]
            pool.kind[request] = times.ended_kind[request]


answers_ended = jit(_end_answers)
