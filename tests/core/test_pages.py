import numpy as np
import pytest

from stoker.engine.core.pages import PagePool


def test_every_page_but_the_first_is_handed_out_once():
    pool = PagePool(10)
    pages = np.concatenate([pool.take(4), pool.take(0), pool.take(5)])
    assert sorted(pages.tolist()) == list(range(1, 10))
    assert pages.dtype == np.int32 and pool.num_free == 0


def test_taking_too_many_raises_and_takes_none():
    pool = PagePool(4)
    with pytest.raises(RuntimeError, match="asked for 4 pages, 3 are free"):
        pool.take(4)
    assert pool.num_free == 3


def test_released_pages_come_back():
    pool = PagePool(6)
    pages = pool.take(5)
    pool.release(pages[1:3])
    assert set(pool.free_pages().tolist()) == set(pages[1:3].tolist())
    assert set(pool.take(2).tolist()) == set(pages[1:3].tolist())


def test_releasing_more_than_the_pool_has_raises():
    pool = PagePool(4)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(RuntimeError, match="4 free pages in a pool of 3"):
        pool.release(pages)


def test_a_pool_needs_a_page_beside_the_reserved_one():
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)
