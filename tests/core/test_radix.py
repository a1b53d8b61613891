import numpy as np
import pytest

from stoker.engine.core.radix import RadixTree

NS = ("base",)


def ids(*values):
    return np.array(values, np.int32)


def span(start, stop):
    return np.arange(start, stop, dtype=np.int32)


@pytest.fixture(params=[1, 4])
def tree(request):
    tree = RadixTree(request.param)
    yield tree
    tree.check()


def insert(tree, tokens, first_page, namespace=NS, now=0.0):
    """Insert with pages first_page, first_page + 1, ..."""
    n = len(tokens) // tree.page_size
    return tree.insert(tokens, span(first_page, first_page + n), namespace, now)


def test_an_empty_tree_matches_nothing(tree):
    _, pages, num_matched = tree.match(span(0, 8), NS, 1.0)
    assert num_matched == 0 and pages.tolist() == []
    assert list(tree.nodes()) == []


def test_match_gives_the_pages_of_whole_pages_only(tree):
    tokens = span(0, 11)
    node, pages, num_present = insert(tree, tokens, 20)
    whole = 11 // tree.page_size
    assert num_present == 0 and pages.tolist() == list(range(20, 20 + whole))
    found, pages, num_matched = tree.match(tokens, NS, 1.0)
    assert found is node and num_matched == whole * tree.page_size
    assert pages.tolist() == list(range(20, 20 + whole))


def test_a_partial_match_splits_the_edge(tree):
    size = tree.page_size
    tokens = span(0, 6 * size)
    insert(tree, tokens, 10)
    other = tokens.copy()
    other[3 * size + size - 1] = 99  # differs at the end of the fourth page
    node, pages, num_matched = tree.match(other, NS, 1.0)
    assert num_matched == 3 * size and pages.tolist() == [10, 11, 12]
    assert tree.num_nodes == 2 and len(node.children) == 1
    _, pages, num_matched = tree.match(tokens, NS, 1.0)
    assert num_matched == 6 * size and pages.tolist() == [10, 11, 12, 13, 14, 15]


def test_insert_says_how_much_was_there_and_keeps_the_trees_pages(tree):
    size = tree.page_size
    insert(tree, span(0, 4 * size), 10)
    longer = span(0, 6 * size)
    _, pages, num_present = insert(tree, longer, 50)
    assert num_present == 4 * size
    assert pages.tolist() == [10, 11, 12, 13, 54, 55]
    assert tree.num_evictable == 6


def test_namespaces_are_framed():
    tree = RadixTree(1)
    insert(tree, ids(1, 2, 3), 10, namespace=("a", "bc"))
    insert(tree, ids(1, 2, 3), 20, namespace=("ab", "c"))
    assert tree.match(ids(1, 2, 3), ("a", "bc"), 1.0)[1].tolist() == [10, 11, 12]
    assert tree.match(ids(1, 2, 3), ("ab", "c"), 1.0)[1].tolist() == [20, 21, 22]
    assert tree.match(ids(1, 2, 3), ("abc",), 1.0)[2] == 0


def test_lock_protects_the_path_and_split_inherits_it(tree):
    size = tree.page_size
    node, _, _ = insert(tree, span(0, 4 * size), 10)
    tree.lock(node)
    assert (tree.num_evictable, tree.num_protected) == (0, 4)
    insert(tree, np.concatenate([span(0, 2 * size), span(70, 70 + size)]), 30)  # splits it
    assert (tree.num_evictable, tree.num_protected) == (1, 4)
    tree.check()
    assert tree.evict(10).tolist() == [32]
    tree.unlock(node)
    assert (tree.num_evictable, tree.num_protected) == (4, 0)
    assert sorted(tree.evict(10).tolist()) == [10, 11, 12, 13]
    assert list(tree.nodes()) == [] and tree.num_evicted == 5


def test_what_one_lock_alone_holds():
    tree = RadixTree(1)
    left, _, _ = insert(tree, ids(1, 2, 3, 4), 10)
    right, _, _ = insert(tree, ids(1, 2, 5), 20)
    tree.lock(left)
    assert tree.num_held_alone(left) == 4
    tree.lock(right)
    assert (tree.num_held_alone(left), tree.num_held_alone(right)) == (2, 1)
    tree.unlock(left)
    tree.unlock(right)
    assert tree.num_held_alone(left) == 0


def test_the_least_recently_used_leaf_goes_first():
    tree = RadixTree(1)
    for i in range(3):
        insert(tree, ids(i, 7, 8), 10 * i, now=float(i))
    tree.match(ids(0, 7, 8), NS, 5.0)
    assert tree.evict(3).tolist() == [10, 11, 12]
    assert tree.evict(3).tolist() == [20, 21, 22]
    assert tree.evict(3).tolist() == [0, 1, 2]


def test_only_the_needed_tail_of_a_leaf_goes(tree):
    size = tree.page_size
    insert(tree, span(0, 5 * size), 10)
    assert tree.evict(2).tolist() == [13, 14]
    assert tree.match(span(0, 5 * size), NS, 1.0)[1].tolist() == [10, 11, 12]


def test_a_parent_goes_only_after_its_children():
    tree = RadixTree(1)
    insert(tree, ids(1, 2, 3), 10, now=1.0)
    insert(tree, ids(1, 2, 4), 20, now=2.0)
    assert tree.evict(1).tolist() == [12]
    assert tree.evict(1).tolist() == [22]
    assert tree.evict(2).tolist() == [10, 11]


def test_a_lock_on_an_unknown_namespace_leaves_no_trace(tree):
    node, _, _ = tree.match(span(0, 4), ("new",), 1.0)
    tree.lock(node)
    inserted, _, _ = insert(tree, span(0, 8), 10, namespace=("new",))
    tree.unlock(node)
    assert tree.match(span(0, 8), ("new",), 2.0)[0] is inserted
    tree.flush()
    assert list(tree.nodes()) == []


def test_flush_keeps_what_is_locked():
    tree = RadixTree(1)
    node, _, _ = insert(tree, ids(1, 2), 10)
    insert(tree, ids(1, 3), 20)
    tree.lock(node)
    assert tree.flush().tolist() == [21]
    assert tree.num_protected == 2
    tree.unlock(node)


def test_the_heap_holds_a_node_once():
    tree = RadixTree(1)
    node, _, _ = insert(tree, ids(1, 2), 10)
    for i in range(100):
        tree.match(ids(1, 2), NS, float(i))
        tree.lock(node)
        tree.unlock(node)
    assert len(tree._heap) == 1
    assert sorted(tree.evict(2).tolist()) == [10, 11]
