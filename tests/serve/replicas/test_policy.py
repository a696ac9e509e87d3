"""Which replica gets a request: pure decisions."""

import random
from collections import Counter

import pytest

from jaxinfer.kv_cache.digests import prefix_digests
from serve.replicas.config import RoutingConfig
from serve.replicas.policy import Candidate, PrefixAware, RoundRobin, RouteKey, make_policy
from serve.replicas.prefixes import PlacedPrefixes

BLOCK = 16


def key(tokens: list[int], avoid: frozenset[str] = frozenset(), salt: str | None = None) -> RouteKey:
    return RouteKey(tuple(prefix_digests(tokens, BLOCK, salt)), len(tokens), BLOCK, avoid)


def idle(*names: str) -> list[Candidate]:
    return [Candidate(name) for name in names]


def prompt(seed: int, length: int = 256) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def test_a_prefix_returns_to_its_replica():
    policy = PrefixAware(RoutingConfig())
    tokens = prompt(0)
    policy.placed("b", key(tokens))
    assert policy.rank(idle("a", "b", "c"), key([*tokens, 1, 2, 3]))[0] == "b"
    other_salt = [policy.rank(idle("a", "b", "c"), key(prompt(i), salt="x"))[0] for i in range(30)]
    assert set(other_salt) == {"a", "b", "c"}, "prompts that nobody has seen are spread"


def test_the_replica_with_more_of_the_prefix_wins():
    policy = PrefixAware(RoutingConfig())
    tokens = prompt(0)
    policy.placed("a", key(tokens[:64]))
    policy.placed("b", key(tokens))
    assert policy.rank(idle("a", "b", "c"), key(tokens)) == ["b", "a", "c"]


def test_affinity_gives_way_to_load_in_proportion():
    """256 cached tokens are worth two requests of 128 each."""
    policy = PrefixAware(RoutingConfig(request_tokens=128))
    tokens = prompt(0)
    policy.placed("b", key(tokens))
    for behind, best in ((0, "b"), (1, "b"), (3, "a"), (10, "a")):
        assert policy.rank([Candidate("a"), Candidate("b", behind)], key(tokens))[0] == best


def test_no_prefix_is_worth_more_than_the_bound():
    policy = PrefixAware(RoutingConfig(request_tokens=1, max_imbalance=4))
    tokens = prompt(0, 4096)
    policy.placed("b", key(tokens))
    assert policy.rank([Candidate("a", 3), Candidate("b", 7)], key(tokens))[0] == "b"
    assert policy.rank([Candidate("a", 3), Candidate("b", 8)], key(tokens))[0] == "a"


def test_a_full_kv_cache_is_avoided():
    policy = PrefixAware(RoutingConfig(kv_tokens=2048, kv_limit=0.8))
    tokens = prompt(0)
    policy.placed("b", key(tokens))
    assert policy.rank([Candidate("a"), Candidate("b", kv_usage=0.8)], key(tokens))[0] == "b"
    assert policy.rank([Candidate("a"), Candidate("b", kv_usage=0.95)], key(tokens))[0] == "a"


def test_replicas_that_were_tried_come_last():
    for policy in (PrefixAware(RoutingConfig()), RoundRobin()):
        policy.placed("b", key(prompt(0)))
        ranked = policy.rank(idle("a", "b"), key(prompt(0), frozenset("b")))
        assert ranked == ["a", "b"]
        assert policy.rank(idle("b"), key(prompt(0), frozenset("b"))) == ["b"]


def test_two_ingresses_choose_the_same_replica_for_an_unknown_prefix():
    """Tenants share a head, which both know everywhere; the block behind it decides."""
    names = ("a", "b", "c", "d")
    head = prompt(99, 64)
    policies = [PrefixAware(RoutingConfig()), PrefixAware(RoutingConfig())]
    for policy in policies:
        for name in names:
            policy.placed(name, key(head))
    choices = []
    for tenant in range(40):
        tokens = head + prompt(tenant)
        first, second = (policy.rank(idle(*names), key(tokens))[0] for policy in policies)
        assert first == second
        choices.append(first)
    assert min(Counter(choices).values()) >= 3, "and tenants are spread"


def test_a_popular_prefix_does_not_make_a_hot_spot():
    """Requests that never end, all with one prefix: the loads stay within its worth of each other."""
    policy = PrefixAware(RoutingConfig(request_tokens=128, max_imbalance=16))
    tokens = prompt(0, 512)
    load = dict.fromkeys("abcd", 0)
    for _ in range(100):
        chosen = policy.rank([Candidate(name, n) for name, n in load.items()], key(tokens))[0]
        policy.placed(chosen, key(tokens))
        load[chosen] += 1
        assert max(load.values()) - min(load.values()) <= 512 / 128 + 1
    assert sum(load.values()) == 100


def test_replicas_that_are_gone_are_forgotten():
    policy = PrefixAware(RoutingConfig())
    policy.placed("b", key(prompt(0)))
    policy.keep({"a"})
    policy.keep({"a", "b"})
    first = [policy.rank(idle("a", "b"), key(prompt(0)))[0] for _ in range(3)]
    assert len(set(first)) == 1
    assert policy.rank([], key(prompt(0))) == []


def test_what_is_remembered_is_bounded_and_loses_ends_first():
    placed = PlacedPrefixes(limit=4)
    old, new = prefix_digests(prompt(0, 48), BLOCK), prefix_digests(prompt(1, 48), BLOCK)
    placed.add("a", old)
    placed.add("a", new)
    assert len(placed) == 4
    assert placed.matched("a", new) == 3
    assert placed.matched("a", old) == 1, "the first block, without which the others are no use, stays"
    assert placed.matched("b", new) == 0


def test_round_robin_looks_at_nothing():
    policy = make_policy(RoutingConfig(policy="round_robin"))
    turns = [policy.rank([Candidate("b", 9), *idle("a", "c")], key(prompt(0)))[0] for _ in range(6)]
    assert turns == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("salt", [None, "s"])
def test_keys_are_those_of_the_prefix_cache(salt):
    from tests.support import engines

    engine = engines.simulated(engines.config(block_size=4))
    tokens = list(range(1, 14))
    driver = engines.Driver(engine)
    driver.add("r", {"prompt_token_ids": tokens, "cache_salt": salt}, engines.token_params(max_tokens=1))
    driver.drain()
    digests = prefix_digests(tokens, 4, salt)
    assert len(digests) == 3
    assert all(engine.core.scheduler.kv.cache.get(digest) is not None for digest in digests)


def hit_rate(policy: str) -> float:
    """Tokens found by conversations of 16 tenants, five turns each, twelve at a time, over two ingresses on four
    replicas with LRU caches of 256 blocks."""
    rng = random.Random(0)
    config = RoutingConfig(policy=policy, remembered_blocks=256)
    ingresses = [make_policy(config), make_policy(config)]
    caches = {name: PlacedPrefixes(256) for name in "abcd"}
    waiting = [prompt(tenant, 512) for tenant in range(16)]
    talks = [[waiting.pop(), 0] for _ in range(12)]
    running: list[str] = []
    hits = tokens = 0
    while talks:
        talk = rng.choice(talks)
        talk[0] = talk[0] + rng.choices(range(1000), k=48)
        asked, ingress = key(talk[0]), rng.choice(ingresses)
        load = Counter(running)
        replica = ingress.rank([Candidate(name, load[name]) for name in caches], asked)[0]
        ingress.placed(replica, asked)
        running = [*running[-10:], replica]
        hits += BLOCK * caches[replica].matched(replica, asked.digests)
        tokens += asked.num_tokens
        talk[0] = talk[0] + rng.choices(range(1000), k=16)
        caches[replica].add(replica, key(talk[0]).digests)
        talk[1] += 1
        if talk[1] == 5:
            talks.remove(talk)
            talks += [[waiting.pop(), 0]] if waiting else []
    return hits / tokens


def test_conversations_find_twice_as_much_as_by_turns():
    by_turns, by_prefix = hit_rate("round_robin"), hit_rate("prefix")
    assert by_prefix >= 2 * by_turns
    assert by_prefix > 0.5
