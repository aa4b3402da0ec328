"""What must always be true of a scheduler. Runs when the engine is idle, and after every step of the tests."""

from __future__ import annotations

from collections import Counter

from weft.scheduler.cursors import DenoiseCursor, RowCursor, TextCursor
from weft.scheduler.prompt_embeds import TextKey
from weft.scheduler.scheduler import Scheduler


class IntegrityError(AssertionError):
    """The scheduler's books do not add up: a defect of Weft."""


def check_integrity(scheduler: Scheduler) -> None:
    _check_blocks(scheduler)
    _check_requests(scheduler)
    _check_queue(scheduler)
    _check_rows(scheduler)
    _check_images(scheduler)


def _check_blocks(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    held = Counter(block.id for cursor in scheduler.running for block in cursor.blocks)
    free = [block.id for block in pool.free]
    _require(len(free) == pool.num_free == len(set(free)), "the free list's length is wrong, or a block is in it twice")
    _require(0 not in free and held[0] == 0, "the null block is in use")
    for block in pool.blocks[1:]:
        _require(block.refs == held[block.id], f"{block} is held {held[block.id]} times")
    _require(len(free) + len(held) == pool.num_usable, "free and used blocks are not all blocks")
    _require(not held.keys() & set(free), "a block is both free and used")
    for key, block in pool.by_key.items():
        _require(block.key == key, f"{block} is found under a key that is not its own")
    findable = sum(block.key is not None for block in pool.blocks[1:])
    _require(findable == len(pool.by_key), "a block has a key that does not find it")


def _check_requests(scheduler: Scheduler) -> None:
    waiting, running = [*scheduler.waiting, *scheduler.siblings, *scheduler.images.aside], scheduler.running
    everybody = Counter([*waiting, *running, *scheduler.images.drawing])
    _require(all(count == 1 for count in everybody.values()), "a request is in two places")
    _require(everybody.keys() == set(scheduler.cursors.values()), "a request neither waits nor runs")
    for name, cursor in scheduler.cursors.items():
        _require(cursor.id == name and not cursor.ended, f"{cursor} is filed wrongly, or has ended")
        if isinstance(cursor, RowCursor):
            _require(0 <= cursor.pending <= scheduler.num_promises(cursor), f"{cursor} expects a token of no step")
    for cursor in waiting:
        holds = isinstance(cursor, RowCursor) and (cursor.row >= 0 or bool(cursor.blocks))
        _require(not holds and cursor.computed == 0, f"{cursor} waits, but holds something")
    for cursor in running:
        room = len(cursor.blocks) * scheduler.limits.block_size
        _require(cursor.computed <= room, f"{cursor} has more tokens than its blocks hold")
        _require(cursor.settled <= cursor.computed, f"{cursor} would share what is not computed")
        _require(cursor.computed <= cursor.known <= cursor.limit, f"{cursor} ran ahead of itself")
        _require(cursor.limit <= scheduler.limits.max_model_len, f"{cursor} may pass the context limit")


def _check_queue(scheduler: Scheduler) -> None:
    queue, siblings = scheduler.waiting, scheduler.siblings
    _require(len(queue) == sum(1 for _ in queue), "the queue's length is wrong")
    _require(queue.num_tokens == sum(cursor.num_prompt for cursor in queue), "the queue's tokens are miscounted")
    _require(all(cursor in queue for cursor in queue), "a request stands in a line that is not its own")
    for cursor in siblings:
        _require(cursor.preemptions == 0 and bool(cursor.request.sibling_of), f"{cursor} waits for nobody")
    num_open = Counter(cursor.tenant for cursor in scheduler.cursors.values())
    num_queued = Counter(cursor.tenant for cursor in queue)
    _require(queue.tenants.books() == {name: (n, num_queued[name]) for name, n in num_open.items()}, "a tenant's books")


def _check_rows(scheduler: Scheduler) -> None:
    rows = [cursor.row for cursor in scheduler.running] + scheduler.free_rows
    _require(sorted(rows) == list(range(scheduler.limits.max_num_seqs)), "a row is lost, or has two owners")


def _check_images(scheduler: Scheduler) -> None:
    images, limits = scheduler.images, scheduler.limits.image
    open_images = [cursor.drawing for cursor in scheduler.cursors.values() if cursor.drawing is not None]
    _require(images.num_open == len(open_images), "images are miscounted")
    holders = [cursor for cursor in open_images if cursor.slot >= 0]
    _require(images.holdings.num_canvases == len(holders), "canvases are miscounted")
    given = sum(cursor.request.given.num_bytes for cursor in holders)
    _require(images.holdings.given_bytes == given, "tensors of clients are miscounted")
    if limits is not None:
        everything = sorted([cursor.slot for cursor in holders] + images.holdings.free_canvases)
        _require(everything == list(range(limits.max_num_images)), "a canvas is lost, or has two owners")
        _require(images.holdings.num_bytes <= limits.max_embedding_bytes, "images hold more bytes than there are")
    _check_texts(scheduler, open_images)
    _require(all(cursor.slot >= 0 for cursor in images.aside), "an image stands aside that was never admitted")
    for cursor in images.drawing:
        _require(cursor.slot >= 0, f"{cursor} is drawn on nothing")
        _require(not cursor.missing, f"{cursor} is drawn from a text that is not whole")
        _require(cursor.done <= cursor.computed <= cursor.known, f"{cursor} ran ahead of itself")
        _require(cursor.is_begun or cursor.computed == 0, f"{cursor} goes on, but was never begun")
        under_way = scheduler.num_promises(cursor)
        _require((cursor.done == cursor.computed) == (under_way == 0), f"{cursor} expects a step that is not under way")


def _check_texts(scheduler: Scheduler, open_images: list[DenoiseCursor]) -> None:
    texts = scheduler.images.holdings.texts
    held = Counter(text for cursor in open_images for text in cursor.texts if text is not None)
    encoding = Counter(cursor.text for cursor in scheduler.running if isinstance(cursor, TextCursor))
    unused = {text for text in texts.slots if not text.refs}
    _require(texts.unused.keys() == unused, "a text that is used is to be reused, or one that is not never will be")
    for text in texts.slots:
        is_shared = isinstance(text.source, TextKey)
        _require(text.refs == held[text] and (is_shared or text.refs <= 1), f"{text} is held {held[text]} times")
        _require(encoding[text] == text.is_being_encoded, f"{encoding[text]} rows encode {text}")
        _require(not encoding[text] or (is_shared and not text.is_whole), f"{text} is encoded in vain")
        _require(bool(text.refs) or text.is_whole == is_shared, f"{text} is known, and not whole")
        _require(not text.refs or text.source is not None, f"{text} is nothing to draw from")
    findable = {text.source: text for text in texts.slots if isinstance(text.source, TextKey)}
    _require(texts.by_key == findable, "a text is found under a key that is not its own, or not at all")


def _require(truth: bool, otherwise: str) -> None:
    if not truth:
        raise IntegrityError(otherwise)
