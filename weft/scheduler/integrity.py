"""The invariants of a scheduler, checked when the engine is idle and after every step of the tests."""

from __future__ import annotations

from collections import Counter

from weft.scheduler.cursors import DenoiseCursor, PromptEmbedsCursor, RowCursor
from weft.scheduler.prompt_embeds import PromptKey
from weft.scheduler.scheduler import Scheduler


class IntegrityError(AssertionError):
    """An invariant of the scheduler is broken: a defect of Weft."""


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
    miscounted = [block for block in pool.blocks[1:] if block.refs != held.get(block.id, 0)]
    _require(not miscounted, "{} are not held so often", miscounted)
    _require(len(free) + len(held) == pool.num_usable, "free and used blocks do not add up to all blocks")
    _require(not held.keys() & set(free), "a block is both free and used")
    for key, block in pool.by_key.items():
        _require(block.key == key, "{} is found under a key that is not its own", block)
    findable = sum(block.key is not None for block in pool.blocks[1:])
    _require(findable == len(pool.by_key), "a block has a key that does not find it")


def _check_requests(scheduler: Scheduler) -> None:
    waiting, running = [*scheduler.waiting, *scheduler.siblings, *scheduler.images.awaiting_embeds], scheduler.running
    everywhere = Counter([*waiting, *running, *scheduler.images.denoising])
    _require(all(count == 1 for count in everywhere.values()), "a request is in two places")
    _require(everywhere.keys() == set(scheduler.cursors.values()), "a request neither waits nor runs")
    for name, cursor in scheduler.cursors.items():
        _require(cursor.id == name and not cursor.ended, "{} is filed wrongly, or has ended", cursor)
        if isinstance(cursor, RowCursor):
            promised = scheduler.num_promises(cursor) + cursor.drafted
            _require(0 <= cursor.pending <= promised, "{} expects a token of no step", cursor)
            _require(0 <= cursor.drafted <= cursor.pending, "{} has a draft in no step", cursor)
    for cursor in waiting:
        holds = isinstance(cursor, RowCursor) and (cursor.row >= 0 or bool(cursor.blocks))
        _require(not holds and cursor.computed == 0, "{} waits, but holds something", cursor)
    for cursor in running:
        capacity = len(cursor.blocks) * scheduler.limits.block_size
        _require(cursor.computed <= capacity, "{} has more tokens than its blocks hold", cursor)
        _require(cursor.settled <= cursor.computed, "{} would share what is not computed", cursor)
        _require(cursor.draft_computed <= cursor.computed, "{} was drafted further than it is computed", cursor)
        _require(cursor.computed <= cursor.known <= cursor.limit, "{} ran ahead of itself", cursor)
        _require(cursor.limit <= scheduler.limits.max_model_len, "{} may pass the context limit", cursor)


def _check_queue(scheduler: Scheduler) -> None:
    queue, siblings = scheduler.waiting, scheduler.siblings
    _require(len(queue) == sum(1 for _ in queue), "the queue's length is wrong")
    _require(queue.num_tokens == sum(cursor.num_prompt for cursor in queue), "the queue's tokens are miscounted")
    _require(all(cursor in queue for cursor in queue), "a request is in the queue of another tenant or resource")
    for cursor in siblings:
        _require(cursor.preemptions == 0 and bool(cursor.request.sibling_of), "{} waits without a leader", cursor)
    num_open = Counter(cursor.tenant for cursor in scheduler.cursors.values())
    num_queued = Counter(cursor.tenant for cursor in queue)
    _require(
        queue.tenants.books() == {name: (n, num_queued[name]) for name, n in num_open.items()},
        "tenants are miscounted",
    )


def _check_rows(scheduler: Scheduler) -> None:
    rows = [cursor.row for cursor in scheduler.running] + scheduler.free_rows
    _require(sorted(rows) == list(range(scheduler.limits.max_num_seqs)), "a row is lost, or has two owners")


def _check_images(scheduler: Scheduler) -> None:
    images, limits = scheduler.images, scheduler.limits.image
    open_images = [cursor.denoise_cursor for cursor in scheduler.cursors.values() if cursor.denoise_cursor is not None]
    _require(images.num_open == len(open_images), "images are miscounted")
    holders = [cursor for cursor in open_images if cursor.latent_slot >= 0]
    _require(images.memory.num_latent_slots == len(holders), "latent slots are miscounted")
    client_bytes = sum(cursor.request.conditioning.num_bytes for cursor in holders)
    client_bytes += sum(cursor.tensor_bytes for cursor in scheduler.cursors.values())
    _require(images.memory.client_bytes == client_bytes, "bytes of client tensors are miscounted")
    _require(client_bytes <= scheduler.limits.max_client_bytes, "client tensors have more bytes than there are")
    for row_cursor in scheduler.running:
        is_held = not row_cursor.request.embeds or row_cursor.tensor_bytes == row_cursor.request.tensor_bytes
        _require(is_held, "{} runs without the bytes of its prompt embeds", row_cursor)
    if limits is not None:
        everything = sorted([cursor.latent_slot for cursor in holders] + images.memory.free_latent_slots)
        _require(everything == list(range(limits.max_num_images)), "a latent slot is lost, or has two owners")
        _require(images.memory.num_bytes <= limits.max_embedding_bytes, "images hold more bytes than there are")
    _check_embeds(scheduler, open_images)
    _require(
        all(cursor.latent_slot >= 0 for cursor in images.awaiting_embeds),
        "an image was never admitted",
    )
    for cursor in images.denoising:
        _require(cursor.latent_slot >= 0, "{} is denoised without a latent slot", cursor)
        _require(not cursor.missing, "{} is denoised with incomplete prompt embeds", cursor)
        _require(cursor.done <= cursor.computed <= cursor.known, "{} ran ahead of itself", cursor)
        _require(cursor.is_begun or cursor.computed == 0, "{} goes on, but was never begun", cursor)
        under_way = scheduler.num_promises(cursor)
        _require(
            (cursor.done == cursor.computed) == (under_way == 0), "{} expects a step that is not under way", cursor
        )


def _check_embeds(scheduler: Scheduler, open_images: list[DenoiseCursor]) -> None:
    cache = scheduler.images.memory.embeds
    held = Counter(slot for cursor in open_images for slot in cursor.embeds if slot is not None)
    encoding = Counter(cursor.slot for cursor in scheduler.running if isinstance(cursor, PromptEmbedsCursor))
    unused = {slot for slot in cache.slots if not slot.refs}
    _require(cache.unused.keys() == unused, "a slot of prompt embeds is used and reusable, or neither")
    for slot in cache.slots:
        is_shared = isinstance(slot.source, PromptKey)
        _require(slot.refs == held[slot] and (is_shared or slot.refs <= 1), "{} is held {} times", slot, held[slot])
        _require(encoding[slot] == slot.is_being_encoded, "{} rows encode {}", encoding[slot], slot)
        _require(not encoding[slot] or (is_shared and not slot.is_complete), "{} is encoded in vain", slot)
        _require(bool(slot.refs) or slot.is_complete == is_shared, "{} is cached, but not complete", slot)
        _require(not slot.refs or slot.source is not None, "{} is used, but empty", slot)
    findable = {slot.source: slot for slot in cache.slots if isinstance(slot.source, PromptKey)}
    _require(cache.by_key == findable, "prompt embeds are found under a key that is not their own, or not at all")


def _require(truth: bool, otherwise: str, *facts: object) -> None:
    """Raise with a text that is written only then: most of the time of a check would be its texts."""
    if not truth:
        raise IntegrityError(otherwise.format(*facts))
