"""Compares the tree of guesses with plain enumerations: which node is next, what is sent, and what a message says."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.edge.drafting.calibration import LOOKUP_RANK, Guess
from outrider.edge.drafting.price import SendPrice
from outrider.edge.drafting.tree import GuessNode, GuessTree
from outrider.edge.modes.stream import path_message, tree_message
from outrider.models.wire.protocol import MAX_PATH_TOKENS, DraftRequest
from outrider.models.wire.tree_draft import ROOT, decode_tree, level_of

CHANCES = (0.93, 0.71, 0.52, 0.31, 0.17, 0.05)
SEEDS = st.integers(0, 1 << 32)


def some_guesses(chance: random.Random) -> list[Guess]:
    """Up to three guesses of other tokens, with chances that do not rise."""
    tokens = chance.sample(range(5), chance.randrange(4))
    cells = sorted(chance.choices(range(len(CHANCES)), k=len(tokens)))
    return [Guess(token, rank, cell) for rank, (token, cell) in enumerate(zip(tokens, cells, strict=True))]


def grown(tree: GuessTree, *guesses: Guess) -> list[GuessNode]:
    """Expands the likeliest node that waits."""
    (node,) = tree.take_best(1, 0.0, 99)
    return tree.expand(node, guesses)


def below(node: GuessNode) -> Iterator[tuple[GuessNode, float]]:
    """Every node below `node`, and the chance of reaching it from there: the product of the chances on the way."""
    for child in node.children.values():
        yield child, CHANCES[child.cell]
        for deeper, reach in below(child):
            yield deeper, CHANCES[child.cell] * reach


def change(tree: GuessTree, chance: random.Random) -> None:
    """Adds a path of another source, or takes a commit."""
    if chance.random() < 0.4:
        tree.add_path([Guess(chance.randrange(5), 0, chance.randrange(len(CHANCES))) for _ in range(3)])
    else:
        for _ in range(chance.randint(1, 2)):
            tree.advance(chance.choice([*tree.root.children, 9]))
        tree.replant()


def test_a_guess_is_no_likelier_than_a_better_one() -> None:
    """Whatever few tests say of their cells; lookup's is another kind of guess."""
    tree = GuessTree(CHANCES.__getitem__)
    found = grown(tree, Guess(1, 0, 2), Guess(2, 1, 0), Guess(3, 2, 4), Guess(4, LOOKUP_RANK, 1))
    assert [node.chance for node in found] == [0.52, 0.52, 0.17, 0.71]


@settings(deadline=None, max_examples=150)
@given(seed=SEEDS, least=st.sampled_from([0.0, 0.02]))
def test_the_next_node_is_the_likeliest_of_all_that_wait(seed: int, least: float) -> None:
    """As an enumeration of all nodes by the product of their chances says, with a floor and a longest depth.

    Among commits, paths of another source that confirm guesses, and nodes that are being expanded meanwhile.
    """
    chance = random.Random(seed)
    tree, max_depth = GuessTree(CHANCES.__getitem__, least), chance.randint(1, 5)
    taken, busy = set[GuessNode](), list[GuessNode]()  # every node that was ever given out; those being expanded
    for _ in range(25):
        if busy and chance.random() < 0.7:
            tree.expand(busy.pop(chance.randrange(len(busy))), some_guesses(chance))
        elif chance.random() < 0.3:
            change(tree, chance)
        everyone = [(tree.root, 1.0), *below(tree.root)]
        assert tree.num_nodes == len(everyone) - 1
        assert all(node.reach == pytest.approx(reach) and tree.is_live(node) for node, reach in everyone)
        deepest = tree.root.depth + max_depth
        waiting = sorted(
            (reach for node, reach in everyone if node not in taken and node.depth < deepest), reverse=True
        )
        if all(node.depth < deepest for node, _ in everyone):
            assert tree.reaches(3) == pytest.approx(waiting[:3])
        assert tree.best_reach(max_depth) == pytest.approx(waiting[0] if waiting else 0.0)
        most, floor = chance.randrange(4), chance.choice([0.0, 0.1, 0.4])
        best = tree.take_best(most, floor, max_depth)
        assert [node.reach for node in best] == pytest.approx([reach for reach in waiting if reach >= floor][:most])
        assert not taken & set(best) and all(node.depth < deepest for node in best)
        taken |= set(best)
        busy += best


def test_a_guess_that_lookup_and_model_share_is_reached_more_often_at_once() -> None:
    """What is below it too: it is expanded before the rest, and not only after the next commit."""
    tree = GuessTree((0.2, 0.9, 0.5).__getitem__)
    tree.add_path([Guess(1, 0, 0), Guess(2, 0, 2)])
    grown(tree, Guess(5, 0, 2), Guess(1, 1, 1))
    assert [node.path() for node in tree.take_best(3, 0.0, 9)] == [[1], [5], [1, 2]]


def test_unlikely_guesses_are_not_kept() -> None:
    """And what follows a dead node is dropped."""
    tree = GuessTree((0.5, 0.1).__getitem__, least=0.2)
    (kept,) = grown(tree, Guess(1, 0, 0), Guess(2, 1, 1))
    assert kept.token == 1 and [guess.token for guess in tree.root.guesses] == [1, 2]
    tree.advance(3)
    tree.replant()
    assert tree.expand(kept, [Guess(4, 0, 0)]) == [] and tree.num_nodes == 0


@settings(deadline=None, max_examples=150)
@given(seed=SEEDS)
def test_each_node_is_sent_once_after_its_parent(seed: int) -> None:
    """Never twice, likely ones only; all again after `renumber`; after `unsend` those that the server cannot attach.

    They hang on a lost node, also on one that was committed before its loss was noticed.
    """
    chance, tree = random.Random(seed), GuessTree(CHANCES.__getitem__)
    sent: dict[GuessNode, int] = {}  # nodes that the server has, and their numbers
    # The numbered nodes by which the server attaches a node, committed ones too.
    ways: dict[GuessNode, set[GuessNode]] = {}
    for _ in range(30):
        for node in tree.take_best(chance.randint(0, 3), 0.0, 6):
            tree.expand(node, some_guesses(chance))
        if chance.random() < 0.3:
            change(tree, chance)
        everyone = dict(below(tree.root))
        what = chance.random()
        if what < 0.1:
            tree.renumber()
            sent, ways = {}, {}
            assert tree.num_sent == 0
        elif what < 0.3 and sent:
            lost = chance.sample(list(sent), min(len(sent), 2))
            tree.unsend(lost)
            sent = {node: number for node, number in sent.items() if not ways[node] & set(lost)}
        unsent = {node for node in everyone if node not in sent}
        assert bool(tree.unsent) == bool(unsent)
        assert tree.has_sent == any(child in sent for child in tree.root.children.values())
        floor, most, before = chance.choice([0.0, 0.05, 0.3]), chance.choice([1, 3, 100]), tree.num_sent
        nodes = tree.take_unsent(floor, most)
        assert [node.number for node in nodes] == [*range(before, tree.num_sent)]
        assert len(nodes) == min(most, sum(node.reach >= floor for node in unsent))
        for node in nodes:
            assert node in unsent and node.reach >= floor and node.number is not None
            assert node.parent is not None and (node.parent is tree.root or node.parent in sent)
            above = ways[node.parent] if node.parent is not tree.root else set()
            sent[node], ways[node] = node.number, {node, *above}
        assert all(node.number == number for node, number in sent.items() if node in everyone)


@settings(deadline=None, max_examples=100)
@given(seed=SEEDS)
def test_the_messages_decode_to_the_tree_that_was_sent(seed: int) -> None:
    """A server that keeps the numbers rebuilds every node's text and chance, whatever was committed in between."""
    chance, tree, known = random.Random(seed), GuessTree(CHANCES.__getitem__), list[int]()
    texts: dict[int, tuple[int, ...]] = {}  # of the server: a node's whole text, by its number
    for _ in range(25):
        for node in tree.take_best(chance.randint(0, 3), 0.0, 6):
            tree.expand(node, some_guesses(chance))
        if chance.random() < 0.3:
            known.append(chance.choice([*tree.root.children, 9]))
            tree.advance(known[-1])
            tree.replant()
        if not (nodes := tree.take_unsent(0.02, chance.choice([2, 100]))):
            continue
        message = tree_message(len(known), nodes)
        assert message.media_type == "application/vnd.outrider.tree"
        found = decode_tree(message.body)
        assert (found.base, found.first) == (len(known), nodes[0].number)
        for index, node in enumerate(nodes):
            above = tuple(known[: found.base]) if found.parents[index] == ROOT else texts[found.parents[index]]
            texts[found.first + index] = (*above, found.tokens[index])
            assert texts[found.first + index] == (*known, *node.path())
            assert found.levels[index] == level_of(CHANCES[node.cell])


def test_a_guess_of_the_next_token_names_no_number() -> None:
    """The server may have forgotten the committed node; the message stands alone, and is shorter."""
    tree = GuessTree(CHANCES.__getitem__)
    tree.add_path([Guess(1, 0, 0)])
    tree.take_unsent(0.0, 9)
    tree.advance(1)
    tree.replant()
    tree.add_path([Guess(2, 0, 0)])
    assert decode_tree(tree_message(1, tree.take_unsent(0.0, 9)).body).parents == [ROOT]


def test_the_path_for_an_old_server_is_the_likeliest() -> None:
    """At each node the likeliest child, as far as an old message reaches."""
    tree = GuessTree((0.99, 0.01).__getitem__)
    for depth in range(MAX_PATH_TOKENS + 4):
        grown(tree, Guess(100 + depth, 0, 0), Guess(depth, 1, 1))
    path = [node.token for node in tree.likeliest()]
    message = path_message(7, path)
    assert path == [*range(100, 104 + MAX_PATH_TOKENS)] and message.media_type == "application/json"
    request = DraftRequest.model_validate_json(message.body)
    assert (request.base, request.paths) == (7, [path[:MAX_PATH_TOKENS]])


@pytest.mark.parametrize("budget", [40.0, 150.0, 600.0])
@pytest.mark.parametrize("tokens_per_commit", [1, 4])
def test_a_price_keeps_a_sender_near_its_budget(budget: float, tokens_per_commit: int) -> None:
    """A sender whose guesses above a floor grow as the floor falls, by chance more or fewer from commit to commit."""
    price, chance, total = SendPrice(budget), random.Random(1), 0
    for index in range(600):
        for _ in range(3):  # messages of a commit
            num_bytes = round(4 * tokens_per_commit * chance.uniform(0.2, 1.8) / price.floor**0.7)
            price.sent(num_bytes)
            total += num_bytes if index >= 200 else 0
        price.committed(tokens_per_commit)
    assert 0.85 * budget < total / (400 * tokens_per_commit) < 1.1 * budget


def test_a_price_holds_nothing_back_that_is_cheap_and_nothing_of_a_path() -> None:
    """The floor stays within its range: a sender with few guesses sends them all, a path is sent whole."""
    few, many, path = SendPrice(150.0), SendPrice(150.0), SendPrice(150.0, is_path=True)
    for _ in range(300):
        for price, num_bytes in ((few, 3), (many, 10**6), (path, 10**6)):
            price.sent(num_bytes)
            price.committed(1)
    assert few.floor < 0.005 and (many.floor, path.floor) == (0.5, 0.0)
