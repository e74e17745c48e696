"""Keys and values of many sequences in pages of one pool, which sequences share where they begin alike.

A page has owners, sequences that read it, and keepers, computed prompts that may be wanted again; it is given on when
it has neither. Whoever wants to write to a page that others have, too, gets a copy. Who has which page is decided
without the device; before a pass the pool settles once what that comes to: memory for its layers, copies, and zeros
in pages that are given on. A kernel may load whole pages and multiply what lies behind a sequence's end by nothing,
and NaN times nothing is NaN: what one sequence left behind must not be met by another.

Shape suffixes: N pages, P positions of a page, T tokens, G key-value heads, D head size; 2 is keys, values.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from weakref import WeakSet

import torch

from twinkle.infra.device_memory import DeviceMemory, unbounded
from twinkle.infra.sending import send


class Page:
    """A page, wherever it lies."""

    __slots__ = ("index", "num_keepers", "num_owners", "num_pins")

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_owners = 0
        self.num_keepers = 0
        self.num_pins = 0
        """Copies of it that are yet to be made, and whoever lets it take what nobody reads."""

    @property
    def is_kept_only(self) -> bool:
        """Whether no sequence reads it."""
        return self.num_keepers > 0 and self.num_owners == 0

    @property
    def is_shared(self) -> bool:
        """Whether somebody else has it beside the sequence that asks."""
        return self.num_owners + self.num_keepers > 1


class PagePool:
    """All pages, and the tensors that they lie in, one for each layer; those appear with a layer's first keys.

    Tensors grow with the pages there are, twofold up to what is expected at most and as far as there is room, and give
    back on demand.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._expected = (0, 0)
        self._memory = unbounded(torch.device("cpu"))
        self.epoch = 0
        """Counts how often pages were moved."""
        self.tensor_epoch = 0
        """Counts how often the memory that they lie in was another one afterwards."""
        self.num_owned = 0
        self.num_kept_only = 0
        self.num_keepers = 0
        self._pages: list[Page | None] = []
        self._holes: list[int] = []
        self._fresh: set[Page] = set()
        self._copies: dict[Page, Page] = {}
        self._num_tensor_pages = 0
        self._layers_2NPGD: dict[int, torch.Tensor] = {}
        self._page_bytes: dict[int, int] = {}
        self._readers: WeakSet[object] = WeakSet()
        self._is_asked_back = False

    @property
    def num_pages(self) -> int:
        """How many somebody has."""
        return len(self._pages) - len(self._holes)

    @property
    def page_bytes(self) -> int:
        """What one takes in all layers; 0 before the first pass."""
        return sum(self._page_bytes.values())

    @property
    def size_bytes(self) -> int:
        """What nobody has, of the memory there is for pages: all of it is somebody's guest."""
        held = sum(layer_2NPGD.nbytes for layer_2NPGD in self._layers_2NPGD.values())
        return max(0, held - self.num_pages * self.page_bytes)

    def live_in(self, memory: DeviceMemory, *, num_pages: int, kept_bytes: int) -> None:
        """Be its guest with what nobody has. Sequences and what is kept for others will have no more than these."""
        self._memory, self._expected = memory, (num_pages, kept_bytes)
        memory.add_guest("unused pages", self)

    def take(self) -> Page:
        """Gives a sequence a page with nothing in it."""
        if self._holes:
            page = Page(heapq.heappop(self._holes))
            self._pages[page.index] = page
        else:
            page = Page(len(self._pages))
            self._pages.append(page)
        self._fresh.add(page)
        self._change(page, owners=1)
        return page

    def own(self, page: Page) -> None:
        """One more sequence reads it."""
        self._change(page, owners=1)

    def disown(self, page: Page) -> None:
        """A sequence has done with it."""
        self._change(page, owners=-1)

    def keep(self, page: Page) -> None:
        """It may be wanted again."""
        self._change(page, keepers=1)

    def forget(self, page: Page) -> None:
        """It is not kept for others any more."""
        self._change(page, keepers=-1)

    def take_spare(self) -> Page:
        """Gives a page that no sequence has, to take what nobody will read; it is given up by ``drop_spare``."""
        page = self.take()
        self._change(page, owners=-1, pins=1)
        return page

    def drop_spare(self, page: Page) -> None:
        """Nothing is written there any more."""
        self._change(page, pins=-1)

    def own_alone(self, page: Page) -> Page:
        """Gives a sequence a copy of its own, if it shares the page."""
        if not page.is_shared:
            return page
        copy = self.take()
        if page not in self._fresh:
            self._fresh.remove(copy)
            source = self._copies.get(page, page)
            self._copies[copy] = source
            self._change(source, pins=1)
        self._change(page, owners=-1)
        return copy

    @torch.inference_mode()
    def settle(self) -> None:
        """Makes the device's memory what was decided since the last time. May be done again when it has failed."""
        if self._is_asked_back:
            self.trim()
        self._grow()
        layers = list(self._layers_2NPGD.values())
        if layers and self._copies:
            sources = _sent((page.index for page in self._copies.values()), layers[0])
            copies = _sent((page.index for page in self._copies), layers[0])
            for layer_2NPGD in layers:
                layer_2NPGD.index_copy_(1, copies, layer_2NPGD.index_select(1, sources))
        if layers and self._fresh:
            fresh = _sent((page.index for page in self._fresh), layers[0])
            for layer_2NPGD in layers:
                layer_2NPGD.index_fill_(1, fresh, 0)
        self._fresh.clear()
        copied = list(self._copies.values())
        self._copies.clear()
        for page in copied:
            self._change(page, pins=-1)

    def layer(self, layer_index: int, like_1GTD: torch.Tensor) -> torch.Tensor:
        """Returns where a layer's keys and values lie [2, N, P, G, D], with new memory for one that had none."""
        layer_2NPGD = self._layers_2NPGD.get(layer_index)
        if layer_2NPGD is None:
            num_groups, _, head_size = like_1GTD.shape[1:]
            shape = (2, self._num_tensor_pages, self.page_tokens, num_groups, head_size)
            layer_2NPGD = self._layers_2NPGD[layer_index] = like_1GTD.new_zeros(shape)
            self.tensor_epoch += 1
            self._page_bytes[layer_index] = layer_2NPGD.nbytes // self._num_tensor_pages
        return layer_2NPGD

    def write(self, layer_index: int, kv_21GTD: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Puts keys and values of tokens where ``slots_T`` says, counting the positions of all pages.

        Returns where the layer's lie [2, N, P, G, D], these included.
        """
        layer_2NPGD = self.layer(layer_index, kv_21GTD[0])
        layer_2NPGD.flatten(1, 2).index_copy_(1, slots_T, kv_21GTD[:, 0].transpose(1, 2))
        return layer_2NPGD

    def add_reader(self, reader: object) -> None:
        """Moves no page for as long as somebody lives who knows where they lie."""
        self._readers.add(reader)

    def give_back(self, num_bytes: int) -> None:
        """See :class:`Guest`; all that nobody has, whatever is wanted: it costs the same."""
        del num_bytes
        self.trim()

    @torch.inference_mode()
    def trim(self) -> None:
        """Moves all pages to the front, and gives back the memory behind them; after the pass, while one goes on."""
        self._is_asked_back = bool(self._readers)
        count = self.num_pages
        last = max((page.index for page in self._pages if page is not None), default=-1)
        is_settled = last < self._num_tensor_pages
        if self._readers or not is_settled or count == self._num_tensor_pages:
            return
        holes = sorted(index for index in self._holes if index < count)
        moving = [page for page in self._pages[count:] if page is not None]
        if moving:
            for layer_2NPGD in self._layers_2NPGD.values():
                sources = _sent((page.index for page in moving), layer_2NPGD)
                layer_2NPGD.index_copy_(1, _sent(holes, layer_2NPGD), layer_2NPGD.index_select(1, sources))
            for page, index in zip(moving, holes, strict=True):
                page.index = index
                self._pages[index] = page
            self.epoch += 1
        del self._pages[count:]
        self._holes.clear()
        # First, as a layer that is larger than that does no harm.
        self._num_tensor_pages = count
        self.tensor_epoch += 1
        for layer_index, layer_2NPGD in list(self._layers_2NPGD.items()):
            if count:
                self._layers_2NPGD[layer_index] = layer_2NPGD[:, :count].contiguous()
            else:
                del self._layers_2NPGD[layer_index]

    def _grow(self) -> None:
        if len(self._pages) <= self._num_tensor_pages:
            return
        # The new pages count as held by those who took them; a layer lies there twice while it grows.
        twice = max((layer_2NPGD.nbytes for layer_2NPGD in self._layers_2NPGD.values()), default=0)
        self._memory.make_room(twice)
        self._move_into_holes()
        needed = len(self._pages)
        if needed <= self._num_tensor_pages:
            return
        num_pages, kept_bytes = self._expected
        page_bytes = max(1, self.page_bytes)
        spare = max(0, self._memory.free_bytes - twice) // page_bytes
        num_pages = max(needed, min(2 * self._num_tensor_pages, num_pages + kept_bytes // page_bytes, needed + spare))
        self.tensor_epoch += 1
        for layer_index, layer_2NPGD in self._layers_2NPGD.items():
            if layer_2NPGD.shape[1] < num_pages:
                larger = layer_2NPGD.new_empty(2, num_pages, *layer_2NPGD.shape[2:])
                larger[:, : layer_2NPGD.shape[1]] = layer_2NPGD
                self._layers_2NPGD[layer_index] = larger
        self._num_tensor_pages = num_pages

    def _move_into_holes(self) -> None:
        """Pages that lie in no memory yet get that of others, as far as it goes."""
        behind = [page for page in self._pages[self._num_tensor_pages :] if page is not None]
        del self._pages[self._num_tensor_pages :]
        self._holes = sorted(index for index in self._holes if index < self._num_tensor_pages)
        for page in behind:
            if self._holes:
                page.index = heapq.heappop(self._holes)
                self._pages[page.index] = page
            else:
                page.index = len(self._pages)
                self._pages.append(page)
        self.epoch += 1

    def _change(self, page: Page, *, owners: int = 0, keepers: int = 0, pins: int = 0) -> None:
        self.num_owned -= page.num_owners > 0
        self.num_kept_only -= page.is_kept_only
        page.num_owners += owners
        page.num_keepers += keepers
        page.num_pins += pins
        if min(page.num_owners, page.num_keepers, page.num_pins) < 0:
            raise AssertionError(f"page {page.index} was given up by somebody who did not have it")
        self.num_owned += page.num_owners > 0
        self.num_kept_only += page.is_kept_only
        self.num_keepers += keepers
        if page.num_owners == page.num_keepers == page.num_pins == 0:
            self._give_on(page)

    def _give_on(self, page: Page) -> None:
        self._pages[page.index] = None
        heapq.heappush(self._holes, page.index)
        self._fresh.discard(page)
        source = self._copies.pop(page, None)
        if source is not None:
            self._change(source, pins=-1)


def _sent(indices: Iterable[int], layer_2NPGD: torch.Tensor) -> torch.Tensor:
    return send(list(indices), torch.int64, layer_2NPGD.device)
