"""The connection between the processes of an engine, with threads in the place of processes."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import zmq

from jaxinfer.config_hosts import HostsConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.hosts import wire
from jaxinfer.hosts.follower_link import FollowerLink
from jaxinfer.hosts.leader_link import LeaderLink
from jaxinfer.hosts.link import GangError
from serve.launch import free_ports

FACTS = {"version of jax": "1", "cache.block_size": "16"}
NOTICED = 5.0


@dataclass
class Ends:
    """Ranks that have ended, with their reasons."""

    reasons: dict[int, str] = field(default_factory=dict)

    def wait(self, *ranks: int) -> None:
        end = time.monotonic() + 60
        while not set(ranks) <= self.reasons.keys():
            assert time.monotonic() < end, f"only {self.reasons} have ended"
            time.sleep(0.02)


@dataclass
class Gang:
    leader: LeaderLink
    followers: list[FollowerLink]
    ends: Ends


def hosts_of(rank: int, count: int, port: int, **values: float) -> HostsConfig:
    channel = f"127.0.0.1:{port}"
    return HostsConfig(count=count, rank=rank, coordinator="127.0.0.1:1", channel=channel, **values)


@contextmanager
def gang(
    count: int = 3, connect: bool = True, facts: dict[int, dict[str, str]] | None = None, **values: float
) -> Iterator[Gang]:
    port, ends = free_ports(2), Ends()

    def make(kind: Callable, rank: int):
        link = kind(
            hosts_of(rank, count, port, **values), (facts or {}).get(rank, FACTS), lambda status: None
        )
        link.on_end(lambda message: ends.reasons.setdefault(rank, message))
        return link

    leader = make(LeaderLink, 0)
    followers = [make(FollowerLink, rank) for rank in range(1, count)]
    try:
        if connect:
            in_threads(*(link.connect for link in (leader, *followers)))
        yield Gang(leader, followers, ends)
    finally:
        for link in (leader, *followers):
            link.part(None)


def in_threads(*functions: Callable) -> list:
    results: list = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def moves(group: int):
    return lambda gang, number: wire.Moves(gang, number, [(group, 1, 2)])


def test_work_comes_in_order_and_ends() -> None:
    with gang() as all_of:
        for group in range(50):
            all_of.leader.order(moves(group))
        all_of.leader.part(None)
        for follower in all_of.followers:
            seen = [follower.next(30) for _ in range(51)]
            assert [work.moves[0][0] for work in seen[:-1]] == list(range(50))
            assert seen[-1] is None
        time.sleep(0.6)
        assert not all_of.ends.reasons


def test_what_ranks_share() -> None:
    with gang() as all_of:
        links = (all_of.leader, *all_of.followers)
        got = in_threads(*(lambda link=link: link.gather("ranks", [link.rank, 7]) for link in links))
        assert got == [[[0, 7], [1, 7], [2, 7]]] * 3


def test_a_difference_is_named() -> None:
    """On every rank, whether it differs or not."""
    with gang(connect=False, facts={2: FACTS | {"cache.block_size": "32"}}) as all_of:
        errors = in_threads(*(link.connect for link in (all_of.leader, *all_of.followers)))
        for error in errors:
            assert isinstance(error, ConfigError)
            assert "rank 2 differs from rank 0: cache.block_size is 32, not 16" in str(error)


def test_a_rank_that_is_slow_to_listen_hears_the_difference() -> None:
    """What is published before a subscription has arrived is lost."""
    port = free_ports(2)
    leader = LeaderLink(hosts_of(0, 2, port), FACTS, lambda status: None)
    context: zmq.Context = zmq.Context()
    calls, answers = context.socket(zmq.PUSH), context.socket(zmq.SUB)
    calls.connect(f"tcp://127.0.0.1:{port + 1}")
    calls.send(wire.encode(wire.Hello("late", 1, FACTS | {"version of jax": "2"})))
    refused = threading.Thread(target=in_threads, args=(leader.connect,))
    refused.start()
    time.sleep(0.5)
    answers.connect(f"tcp://127.0.0.1:{port}")
    answers.subscribe(b"")
    assert answers.poll(5000)
    message = wire.decode_order(answers.recv())
    assert isinstance(message, wire.Ended)
    assert "version of jax is 2, not 1" in str(message.failure)
    refused.join(30)
    context.destroy(linger=0)


def test_somebody_does_not_come() -> None:
    port = free_ports(2)
    leader = LeaderLink(hosts_of(0, 2, port, start_timeout=0.3), FACTS, lambda status: None)
    with pytest.raises(ConfigError, match=r"ranks \[1\] of 2 have not called"):
        leader.connect()
    follower = FollowerLink(hosts_of(1, 2, port, start_timeout=0.3), FACTS, lambda status: None)
    with pytest.raises(ConfigError, match="rank 0 has not answered"):
        follower.connect()
    follower.part(None)


def test_an_address_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"hosts.channel: .* cannot be listened on"):
            LeaderLink(hosts_of(0, 2, taken.getsockname()[1]), FACTS, lambda status: None)


def test_a_lost_follower_ends_all() -> None:
    """Its connections are closed, as the system does for a process that is killed."""
    with gang(lost_after=30) as all_of:
        started = time.monotonic()
        all_of.followers[1]._close()
        all_of.ends.wait(0, 1)
        assert time.monotonic() - started < NOTICED
        assert "rank 2 is lost" in all_of.ends.reasons[0]
        assert all_of.ends.reasons[1] == all_of.ends.reasons[0]
        with pytest.raises(GangError, match="rank 2"):
            all_of.leader.order(moves(0))


def test_a_lost_leader_ends_all() -> None:
    with gang(lost_after=30) as all_of:
        started = time.monotonic()
        all_of.leader._close()
        all_of.ends.wait(1, 2)
        assert time.monotonic() - started < NOTICED
        assert "rank 0 is lost" in all_of.ends.reasons[1]


def test_silence_is_a_loss() -> None:
    """A host that is frozen, or out of reach, closes no connection."""
    with gang(count=2, lost_after=1) as all_of:
        all_of.followers[0]._tick = lambda: None
        started = time.monotonic()
        all_of.ends.wait(0, 1)
        assert time.monotonic() - started < NOTICED
        assert "nothing was heard of it for 1 s" in all_of.ends.reasons[0]


def test_a_failure_is_told_to_all() -> None:
    with gang() as all_of:
        all_of.followers[0].part("MemoryError: no room")
        all_of.ends.wait(0, 2)
        assert all_of.ends.reasons[2] == "rank 1 failed: MemoryError: no room"


def test_whoever_waits_for_a_lost_rank_is_told() -> None:
    with gang() as all_of:
        results: list = []
        waiting = threading.Thread(
            target=lambda: results.append(in_threads(lambda: all_of.leader.gather("x", 1)))
        )
        waiting.start()
        all_of.followers[0]._close()
        waiting.join(30)
        assert "rank 1 is lost" in str(results[0][0])


def test_a_gap_ends_all() -> None:
    with gang(count=2) as all_of:
        all_of.leader.order(moves(0))
        all_of.leader._number += 1
        all_of.leader.order(moves(1))
        all_of.ends.wait(0, 1)
        assert "message 2 of rank 0 has come where 1 was due" in all_of.ends.reasons[1]


def test_other_tokens_end_all() -> None:
    with gang() as all_of:
        for step in range(3):
            tokens = np.array([step, 5], np.int32)
            all_of.leader.done(tokens)
            all_of.followers[0].done(tokens)
            all_of.followers[1].done(tokens + (step == 1))
        all_of.ends.wait(0, 1, 2)
        assert "rank 2 and rank 0 have diverged" in all_of.ends.reasons[1]


def test_strangers_do_no_harm() -> None:
    with gang(count=2) as all_of:
        host, port = "127.0.0.1", int(str(all_of.leader._hosts.channel).rpartition(":")[2])
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(f"tcp://{host}:{port + 1}")
            stranger.send(b"\xc1 no message")
            stranger.send(wire.encode(wire.Beat("unknown", 9, 9)))
            stranger.send(wire.encode(wire.Hello("late", 1, FACTS)))
            time.sleep(0.6)
        all_of.leader.order(moves(0))
        assert all_of.followers[0].next(30) is not None
        time.sleep(1)
        assert not all_of.ends.reasons
