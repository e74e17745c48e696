"""The pool of pages: every sequence reads what was written for it, and no page is lost or held twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twinkle.infra.device_memory import DeviceMemory, unbounded
from twinkle.sampler.attention import Piece
from twinkle.sampler.paged_attention import PagedAttention
from twinkle.sampler.paged_cache import KeptPages, PagedCache
from twinkle.sampler.pages import Page, PagePool

PAGE = 4
LONGEST = 14
CPU = torch.device("cpu")


@torch.inference_mode()
def write(cache: PagedCache, start: int, values: list[float], pool: PagePool) -> None:
    """One key a token, in two layers."""
    attention = PagedAttention(pool, [Piece(cache, start, len(values))], CPU)
    keys = torch.tensor(values).view(1, 1, -1, 1)
    for layer in range(2):
        pool.write(layer, torch.stack((keys + layer, -keys)), attention._slots_T)
    assert all(each.is_inference() for each in pool._layers_2NPGD.values())  # as in a step of the sampler


@torch.inference_mode()
def held(cache: PagedCache, num_tokens: int, pool: PagePool) -> list[list[float]]:
    """What both layers have of it; what lies behind it in its pages is a number."""
    attention = PagedAttention(pool, [Piece(cache, num_tokens - 1, 1)], CPU)
    found = []
    for layer in range(2):
        layer_2NPGD = pool.layer(layer, torch.zeros(1, 1, 1, 1))
        assert not layer_2NPGD[:, torch.from_numpy(cache.places())].isnan().any()
        keys, values = attention._held(layer_2NPGD, 0, 0)
        assert torch.equal(keys - layer, -values)
        found.append((keys - layer).flatten().tolist())
    return found


class Pools(RuleBasedStateMachine):
    """Sequences that grow, share, are kept and end, beside a list of what each should read."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGE)
        self.pool.live_in(unbounded(CPU), num_pages=6, kept_bytes=0)
        self.sequences: list[tuple[PagedCache, list[float]]] = []
        self.kept: list[tuple[KeptPages, list[float]]] = []
        self.spare: list[Page] = []
        self.seen: tuple[int, list[int]] = (-1, [])
        self.next_value = 0.0

    def one(self, number: int) -> tuple[PagedCache, list[float]]:
        return self.sequences[number % len(self.sequences)]

    @rule()
    def begin(self) -> None:
        self.sequences.append((PagedCache(self.pool), []))

    @rule(number=st.integers(0, 9), num_tokens=st.integers(1, 6))
    def grow(self, number: int, num_tokens: int) -> None:
        if not self.sequences:
            return
        cache, tokens = self.one(number)
        num_tokens = min(num_tokens, LONGEST - len(tokens))
        if num_tokens < 1:
            return
        end, missing = len(tokens) + num_tokens, cache.num_missing(len(tokens), len(tokens) + num_tokens)
        before = self.pool.num_owned
        cache.make_room(len(tokens), end)
        assert self.pool.num_owned == before + missing
        values = [self.next_value + place for place in range(num_tokens)]
        self.next_value += num_tokens
        write(cache, len(tokens), values, self.pool)
        tokens += values

    @rule(number=st.integers(0, 9))
    def end_in_nan(self, number: int) -> None:
        """As a broken adapter leaves its pages behind."""
        if not self.sequences:
            return
        cache, tokens = self.one(number)
        cache.make_room(len(tokens), len(tokens) + PAGE)
        write(cache, len(tokens), [float("nan")] * PAGE, self.pool)
        self.sequences.remove((cache, tokens))
        cache.release()

    @rule(number=st.integers(0, 9), num_tokens=st.integers(1, 6))
    def give_way_before_the_pass(self, number: int, num_tokens: int) -> None:
        if self.sequences:
            cache, tokens = self.sequences.pop(number % len(self.sequences))
            cache.make_room(len(tokens), len(tokens) + num_tokens)
            cache.release()
        # Nothing is left to be done to a page that may be given on by now.
        assert not self.pool._fresh and not self.pool._copies

    @rule(number=st.integers(0, 9))
    def fork(self, number: int) -> None:
        if self.sequences:
            cache, tokens = self.one(number)
            self.sequences.append((cache.fork(), list(tokens)))

    @rule(number=st.integers(0, 9))
    def keep(self, number: int) -> None:
        if self.sequences and self.one(number)[1]:
            cache, tokens = self.one(number)
            self.kept.append((cache.keep(0, len(tokens)), list(tokens)))

    @rule(number=st.integers(0, 9))
    def take(self, number: int) -> None:
        if not self.kept:
            return
        kept, tokens = self.kept[number % len(self.kept)]
        cache = PagedCache(self.pool)
        cache.make_room(0, len(tokens))
        cache.take(0, kept)
        self.sequences.append((cache, list(tokens)))

    @rule(number=st.integers(0, 9))
    def forget(self, number: int) -> None:
        if self.kept:
            self.kept.pop(number % len(self.kept))[0].release()

    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        if self.sequences:
            self.sequences.pop(number % len(self.sequences))[0].release()

    @rule()
    @torch.inference_mode()
    def take_spare(self) -> None:
        """It takes what nobody reads, whatever that is."""
        self.spare.append(self.pool.take_spare())
        self.pool.settle()
        for layer_2NPGD in self.pool._layers_2NPGD.values():
            layer_2NPGD[:, self.spare[-1].index] = torch.nan

    @rule()
    def drop_spare(self) -> None:
        if self.spare:
            self.pool.drop_spare(self.spare.pop())

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @invariant()
    def each_reads_its_own(self) -> None:
        for cache, tokens in self.sequences:
            if tokens:
                assert held(cache, len(tokens), self.pool) == [tokens, tokens]

    @invariant()
    def pages_are_counted(self) -> None:
        owned = {page for cache, _ in self.sequences for page in cache.pages}
        kept = {page for each, _ in self.kept for page in each.pages}
        assert self.pool.num_owned == len(owned)
        assert self.pool.num_kept_only == len(kept - owned)
        every = owned | kept | set(self.spare)
        assert self.pool.num_pages == len(owned | kept) + len(self.spare) == len(every)
        assert len({page.index for page in every}) == len(every)

    @invariant()
    def whoever_knows_addresses_is_told_when_they_change(self) -> None:
        addresses = [layer.data_ptr() for layer in self.pool._layers_2NPGD.values()]
        epoch, before = self.seen
        assert addresses == before or self.pool.tensor_epoch != epoch
        self.seen = self.pool.tensor_epoch, addresses

    def teardown(self) -> None:
        for page in self.spare:
            self.pool.drop_spare(page)
        for cache, _ in self.sequences:
            cache.release()
        for kept, _ in self.kept:
            kept.release()
        assert self.pool.num_pages == self.pool.num_owned == self.pool.num_keepers == 0
        self.pool.trim()
        assert self.pool._layers_2NPGD == {}


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_page_is_given_up_by_those_who_have_it_alone() -> None:
    pool = PagePool(PAGE)
    page = pool.take()
    pool.disown(page)
    with pytest.raises(AssertionError, match="did not have it"):
        pool.disown(page)


def test_no_page_moves_while_somebody_knows_where_it_lies() -> None:
    pool = PagePool(PAGE)
    first, second = PagedCache(pool), PagedCache(pool)
    for cache in (first, second):
        cache.make_room(0, PAGE)
        write(cache, 0, [1.0] * PAGE, pool)
    first.release()
    reader = PagedAttention(pool, [Piece(second, PAGE - 1, 1)], CPU)
    pool.trim()
    assert second.places().tolist() == [1]
    del reader
    pool.trim()
    assert second.places().tolist() == [0]


def test_memory_that_runs_out_midway_is_found_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the layers have grown, or shrunk; the next try does the rest."""
    pool = PagePool(PAGE)
    cache = PagedCache(pool)
    cache.make_room(0, PAGE)
    write(cache, 0, [1.0, 2.0, 3.0, 4.0], pool)
    calls: list[int] = []
    new_empty, contiguous = torch.Tensor.new_empty, torch.Tensor.contiguous

    def failing(inner):  # type: ignore[no-untyped-def]
        def act(*args):  # type: ignore[no-untyped-def]
            calls.append(1)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("no room")
            return inner(*args)

        return act

    cache.make_room(PAGE, 3 * PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", failing(new_empty))
        with pytest.raises(torch.OutOfMemoryError):
            pool.settle()
    write(cache, PAGE, [5.0] * 2 * PAGE, pool)
    assert held(cache, 3 * PAGE, pool)[0] == [1.0, 2.0, 3.0, 4.0, *[5.0] * 8]

    other = PagedCache(pool)
    other.make_room(0, 2 * PAGE)
    write(other, 0, [6.0] * 2 * PAGE, pool)
    cache.release()
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", failing(contiguous))
        with pytest.raises(torch.OutOfMemoryError):
            pool.trim()
    assert held(other, 2 * PAGE, pool)[0] == [6.0] * 8
    other.make_room(2 * PAGE, 3 * PAGE)
    write(other, 2 * PAGE, [7.0] * PAGE, pool)
    assert np.array(held(other, 3 * PAGE, pool)).tolist() == [[*[6.0] * 8, *[7.0] * 4]] * 2


class Others:
    """What else is on the device: it holds so much, and gives it back when it is asked."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def give_back(self, num_bytes: int) -> None:
        self.size_bytes = max(0, self.size_bytes - num_bytes)


class Owned:
    """The sequences of a pool, as a device counts them."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    @property
    def size_bytes(self) -> int:
        return self.pool.num_owned * self.pool.page_bytes


def pool_with_a_page(memory: DeviceMemory, **room: int) -> tuple[PagePool, PagedCache, Owned]:
    pool = PagePool(PAGE)
    pool.live_in(memory, **({"num_pages": 100, "kept_bytes": 0} | room))
    owned = Owned(pool)
    memory.add("sequences", owned)
    cache = PagedCache(pool)
    cache.make_room(0, PAGE)
    write(cache, 0, [1.0, 2.0, 3.0, 4.0], pool)
    return pool, cache, owned


def test_others_give_way_before_the_pool_grows_into_their_room() -> None:
    memory = DeviceMemory(10_000, CPU)
    pool, cache, owned = pool_with_a_page(memory)
    others = Others(memory.free_bytes)
    memory.add_guest("others", others)
    cache.make_room(PAGE, 4 * PAGE)
    pool.settle()
    # With room for one of the two layers a second time, as it was while that was copied.
    assert others.size_bytes <= 10_000 - owned.size_bytes - pool.page_bytes // 2
    assert held(cache, PAGE, pool)[0] == [1.0, 2.0, 3.0, 4.0]


def test_nobody_gives_way_to_pages_that_nobody_has_yet() -> None:
    memory = DeviceMemory(10_000, CPU)
    pool, cache, _ = pool_with_a_page(memory)
    cache.make_room(PAGE, 8 * PAGE)
    pool.settle()
    others = Others(memory.free_bytes - 6 * pool.page_bytes)
    memory.add_guest("others", others)
    before = others.size_bytes
    cache.make_room(8 * PAGE, 9 * PAGE)
    pool.settle()
    layer_2NPGD = pool.layer(0, torch.zeros(1, 1, 1, 1))
    assert others.size_bytes == before
    assert memory.free_bytes >= 0
    assert 9 <= layer_2NPGD.shape[1] < 16


def test_pages_that_a_guest_gives_back_are_taken_before_the_pool_grows() -> None:
    """What is kept of prompts lies in the same pool: on a full device its pages are what there is."""
    memory = DeviceMemory(10_000, CPU)
    pool, cache, _ = pool_with_a_page(memory)
    prompt = PagedCache(pool)
    prompt.make_room(0, 3 * PAGE)
    write(prompt, 0, [9.0] * 3 * PAGE, pool)
    kept = prompt.keep(0, 3 * PAGE)
    prompt.release()

    class Prompts(Others):
        def give_back(self, num_bytes: int) -> None:
            kept.release()
            self.size_bytes = 0

    prompts = Prompts(3 * pool.page_bytes)
    memory.add_guest("kept prompts", prompts)
    memory.fix("base model", memory.free_bytes)
    lying = pool.layer(0, torch.zeros(1, 1, 1, 1)).shape[1]
    cache.make_room(PAGE, 4 * PAGE)
    pool.settle()
    assert pool.layer(0, torch.zeros(1, 1, 1, 1)).shape[1] == lying
    write(cache, PAGE, [5.0] * 3 * PAGE, pool)
    assert held(cache, 4 * PAGE, pool)[0] == [1.0, 2.0, 3.0, 4.0, *[5.0] * 12]
    assert memory.free_bytes == 0
