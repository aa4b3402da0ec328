"""The memory of the worker that images hold: latent slots, and the prompt embeds that their denoise steps read; and
the bytes of all tensors that clients sent, for images or in the place of a prompt's tokens.

Prompt embeds are the hidden states of a prompt, kept in a slot. Images of the same prompt share the slot, and it stays
cached after the last of them until another prompt needs it. Prompt embeds that a client sent belong to one image.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct

from weft.payloads import PromptEmbeds
from weft.plan import Limits, PlacedEmbeds
from weft.types import Request


class PromptKey(Struct, frozen=True):
    """The key that finds the cached embeds of a prompt."""

    cache_salt: str
    token_ids: tuple[int, ...]


EmbedsSource = PromptKey | PromptEmbeds
"""Where prompt embeds come from: a prompt that the language model encodes, or a client's tensor."""


def embeds_sources(request: Request) -> tuple[EmbedsSource | None, EmbedsSource | None]:
    """Return the sources of an image's prompt and, where it is guided, of its negative prompt; None: it is empty."""
    image, conditioning = request.image, request.conditioning
    assert image is not None, "only images have prompt embeds"
    prompt = conditioning.prompt or _key_of(request.prompt_token_ids, request.cache_salt)
    if image.passes == 1:
        return prompt, None
    return prompt, conditioning.negative or _key_of(image.negative_token_ids, request.cache_salt)


def _key_of(token_ids: list[int], cache_salt: str) -> PromptKey | None:
    return PromptKey(cache_salt, tuple(token_ids)) if token_ids else None


class EmbedsSlot:
    """One slot of the worker's table of prompt embeds, and what it contains."""

    __slots__ = ("is_being_encoded", "is_complete", "refs", "slot", "source")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.refs = 0
        """Images that use it."""
        self.source: EmbedsSource | None = None
        """None: the slot is empty."""
        self.is_complete = False
        self.is_being_encoded = False
        """True while a row computes its embeds."""

    def __repr__(self) -> str:
        return f"EmbedsSlot({self.slot}, refs={self.refs}, source={self.source!r:.40})"

    @property
    def needs_encoding(self) -> bool:
        return not self.is_complete and not self.is_being_encoded

    @property
    def placed(self) -> PlacedEmbeds:
        match self.source:
            case PromptKey(token_ids=token_ids):
                return PlacedEmbeds(self.slot, len(token_ids))
            case PromptEmbeds(shape=(rows, _)) as embeds:
                return PlacedEmbeds(self.slot, rows, embeds)
        raise AssertionError("an image uses an empty slot of prompt embeds")


EmbedsPair = tuple[EmbedsSlot | None, EmbedsSlot | None]
"""The slots of a prompt and of a negative prompt; None: the prompt is empty, or there is none."""


class EmbedsCache:
    """The cache finds the embeds of prompts that were encoded before, and reuses the least recently used slots."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [EmbedsSlot(slot) for slot in range(num_slots)]
        self.unused = OrderedDict.fromkeys(self.slots)
        """Slots that no image uses, the next to be reused first: empty ones, then the least recently used."""
        self.by_key: dict[PromptKey, EmbedsSlot] = {}

    @property
    def num_used(self) -> int:
        return len(self.slots) - len(self.unused)

    def take(self, source: EmbedsSource | None) -> EmbedsSlot | None:
        """Return the slot for one more image that uses this source. There must be an unused slot."""
        if source is None:
            return None
        slot = self.by_key.get(source) if isinstance(source, PromptKey) else None
        if slot is None:
            slot, _ = self.unused.popitem(last=False)
            self._forget(slot)
            slot.source = source
            if isinstance(source, PromptKey):
                self.by_key[source] = slot
            else:
                slot.is_complete = True
        elif slot.refs == 0:
            del self.unused[slot]
        slot.refs += 1
        return slot

    def give_back(self, slot: EmbedsSlot) -> None:
        slot.refs -= 1
        if slot.refs:
            return
        self.unused[slot] = None
        if not slot.is_complete or not isinstance(slot.source, PromptKey):
            self._forget(slot)
            self.unused.move_to_end(slot, last=False)

    def forget_unused(self) -> None:
        for slot in self.unused:
            self._forget(slot)

    def _forget(self, slot: EmbedsSlot) -> None:
        if isinstance(slot.source, PromptKey):
            del self.by_key[slot.source]
        slot.source = None
        slot.is_complete = False


class ImageMemory:
    """The latent slots and the prompt embeds that images hold, and the bytes of client tensors of all requests."""

    def __init__(self, of_all: Limits) -> None:
        limits = of_all.image
        if limits is not None and limits.max_client_bytes < 0:
            raise ValueError(f"latent slots and prompt embeds take more than {limits.max_embedding_bytes} bytes")
        self.limits = limits
        self._max_client_bytes = of_all.max_client_bytes
        self.free_latent_slots = list(range(limits.max_num_images - 1, -1, -1)) if limits is not None else []
        self.num_latent_slots = 0
        """Latent slots in use."""
        self.released: list[int] = []
        """Latent slots given back since the last plan, which tells the worker to forget them."""
        self.embeds = EmbedsCache(limits.max_num_embeds if limits is not None else 0)
        self.client_bytes = 0
        """Bytes of client tensors."""

    @property
    def num_bytes(self) -> int:
        if self.limits is None:
            return self.client_bytes
        latents = self.num_latent_slots * self.limits.latent_slot_bytes
        return latents + self.embeds.num_used * self.limits.embeds_bytes + self.client_bytes

    def has_capacity_for(self, request: Request) -> bool:
        """Return whether an image can be admitted."""
        if self.limits is None or not self.free_latent_slots:
            return False
        num_embeds = sum(source is not None for source in self._sources(request))
        return self.has_bytes_for(request) and num_embeds <= len(self.embeds.unused)

    def has_bytes_for(self, request: Request) -> bool:
        """Return whether there are bytes for the tensors of a request."""
        return self.client_bytes + request.tensor_bytes <= self._max_client_bytes

    def take(self, request: Request) -> tuple[int, EmbedsPair]:
        """Return a latent slot and the slots of an image's prompt embeds: all at once, so that no two images wait for
        what the other holds."""
        latent_slot = self.free_latent_slots.pop()
        self.num_latent_slots += 1
        prompt, negative = self._sources(request)
        self.client_bytes += request.conditioning.num_bytes
        return latent_slot, (self.embeds.take(prompt), self.embeds.take(negative))

    def give_back(self, request: Request, latent_slot: int, embeds: EmbedsPair) -> None:
        self.free_latent_slots.append(latent_slot)
        self.released.append(latent_slot)
        self.num_latent_slots -= 1
        for slot in filter(None, embeds):
            self.embeds.give_back(slot)
        self.client_bytes -= request.conditioning.num_bytes

    def _sources(self, request: Request) -> tuple[EmbedsSource | None, EmbedsSource | None]:
        """Return what is kept in slots; a pipeline with a text encoder keeps its prompts with the latents."""
        reads_text = self.limits is not None and self.limits.reads_text
        return (None, None) if reads_text else embeds_sources(request)
