"""Workers that tell by events are looked up by the prompt's tokens, all others by its text."""

from kv_engine import root
from preheat.core.kv_events import Batch, Joined, Removed, Stored
from preheat.core.router import Ask, Router
from preheat.core.routing import POLICIES
from preheat.core.tokens import token_blocks
from preheat.core.told import ToldResidency
from preheat.core.types import Usage

BLOCK = 16
TOKENS = list(range(64 * BLOCK))
ASK = Ask(
    "m",
    [100 + one for one in range(8)],
    block_bytes=512,
    prompt_bytes=4_096,
    token_blocks=token_blocks(TOKENS, BLOCK, root("", "")),
    block_tokens=BLOCK,
)
TEXT_ONLY = Ask("m", ASK.blocks, block_bytes=512, prompt_bytes=4_096)


def told_router() -> tuple[Router, ToldResidency]:
    """Worker 1 tells."""
    router = Router(POLICIES["preheat"]())
    told = ToldResidency(block_tokens=BLOCK, root=root)
    router.index.hears(1, told)
    router.index.told(1, told.take(Joined(whole=True), 0.0))
    return router, told


def hold_all(router: Router, told: ToldResidency) -> None:
    event = Stored(list(range(64)), None, TOKENS, BLOCK)
    router.index.told(1, told.take(Batch(0.0, [event]), 0.0))


def test_what_one_holds_by_its_own_word_draws_the_prompt_nobody_sent_there() -> None:
    router, told = told_router()
    hold_all(router, told)
    route = router.place(ASK, [0, 1, 2], 1.0)
    assert (route.ticket.worker, route.overlap_tokens) == (1, 1_023)
    assert route.best_overlap_tokens == 1_023
    router.ended(route.ticket, Usage(1_024, 1, 1_008, tells_cached=True), 2.0)
    assert told.trust == "told"
    router.index.told(1, told.take(Batch(3.0, [Removed(list(range(64)))]), 3.0))
    router.index.told(1, told.aged(9.0))
    assert router.place(ASK, [0, 1, 2], 9.0).overlap_tokens == 0


def test_what_was_sent_elsewhere_stands_beside_it() -> None:
    router, told = told_router()
    first = router.place(ASK, [0], 0.0)
    router.ended(first.ticket, None, 1.0)
    second = router.place(ASK, [0, 1], 2.0)
    assert (second.ticket.worker, second.overlap_tokens) == (0, 1_023)
    hold_all(router, told)
    assert router.choose(ASK, [1], 3.0)[0].overlap_tokens == 1_023


def test_a_burst_goes_to_one_that_has_not_spoken_yet() -> None:
    router, told = told_router()
    first = router.place(ASK, [1], 0.0)
    assert router.choose(ASK, [0, 1], 0.0)[0].number == 1
    router.failed(first.ticket, 0.1)
    assert router.choose(ASK, [1], 0.1)[0].overlap_tokens == 0
    assert told.holds(ASK.token_blocks) == 0


def test_without_token_ids_the_estimate_by_text_stands() -> None:
    router, told = told_router()
    first = router.place(TEXT_ONLY, [1], 0.0)
    router.ended(first.ticket, None, 1.0)
    later = router.place(TEXT_ONLY, [0, 1], 500.0)
    assert (later.ticket.worker, later.overlap_tokens) == (1, 1_023)
    assert router.choose(ASK, [1], 500.0)[0].overlap_tokens == 0, "by tokens it says what it holds"
    router.ended(later.ticket, Usage(1_024, 1, 1_008, tells_cached=True), 501.0)
    assert len(told) == 0


def test_an_end_that_was_not_tokenised_is_no_lie() -> None:
    router, told = told_router()
    hold_all(router, told)
    part = Ask("m", ASK.blocks, 512, 4_096, "", ASK.token_blocks[:32], BLOCK)
    for at in range(20):
        route = router.place(part, [1], float(at))
        router.ended(route.ticket, Usage(1_024, 1, 1_008, tells_cached=True), at + 0.5)
    assert told.trust == "told"


def test_its_own_word_is_what_an_operator_sees() -> None:
    router, told = told_router()
    hold_all(router, told)
    known = router.known(1, 0.0)
    assert (known.trust, known.held_blocks) == ("told", 64)
    assert router.known(0, 0.0).trust == "estimated"
    router.left(1)
    assert len(router.index) == 0


def test_what_another_process_has_sent_is_there() -> None:
    router, _ = told_router()
    router.learned(0, ASK.blocks, ASK.token_blocks, 0.0)
    assert router.choose(ASK, [0, 1], 1.0)[0].number == 0
    router.learned(1, ASK.blocks, ASK.token_blocks, 1.0)
    assert router.choose(ASK, [1], 1.0)[0].overlap_tokens == 1_023
    router.index.told(1, router.index.best_known(1).aged(9.0))
    assert router.choose(ASK, [1], 9.0)[0].overlap_tokens == 0, "its events would have said so"
    assert router.choose(TEXT_ONLY, [1], 9.0)[0].overlap_tokens == 1_023
