"""The nftables back end when the kernel refuses, forgets to answer, or others change things.

Faults strike at the socket or in the kernel itself, in child processes. NATIVE_ROUNDS says how many
rounds the search for leaks makes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from istio_cni.capture import apply, main, routing
from istio_cni.capture.native import compile_rules
from istio_cni.capture.session import SETTLE_TRIES, Log, changing
from istio_cni.edge import netlink
from istio_cni.edge import netns as namespaces
from istio_cni.edge.netfilter import Netfilter
from istio_cni.edge.netlink import tables as tables_module
from istio_cni.errors import (
    GivenUp,
    Interrupted,
    IstioCNIError,
    ProgrammingFailed,
    TryAgainLater,
)
from istio_cni.rules import nfdump, nfnetlink
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import Rule, Ruleset, Table, jump, owner_uid
from istio_cni.rules.netlink import DELTABLE, NEWRULE, NEWTABLE
from istio_cni.rules.nftables import GUARD, TABLES, complete
from istio_cni.rules.sidecar import generate
from namespaces import call_inside, call_inside_as, enter, inside
from netns.programming import (
    ALL_DNS,
    FIRST_TABLE_ONLY,
    FORK,
    TPROXY,
    VARIANTS,
    check,
    clean_up,
    config,
    holders,
    program,
    run,
    state,
    wait_until,
    wrap,
)
from netns.traffic import APPLICATION

pytestmark = pytest.mark.netns

ROUNDS = int(os.environ.get("NATIVE_ROUNDS") or 160)
THREADS, PODS = 8, 64
BATCH_BEGIN = 0x10
OURS = tuple(TABLES.values())
NO_TABLES = 6  # a number of netfilter's under which nothing takes batches
NO_NETFILTER = 31  # a netlink protocol that there is not


def native(**settings: object) -> CaptureConfig:
    """Return the defaults of a captured pod, for this back end, with some settings changed."""
    return config("", BACKEND="nftables", **settings)


NATIVE = apply.Choice(apply.NFTABLES, "a test")
PLAIN, WHOLE = native(**ALL_DNS), native(**TPROXY, **ALL_DNS)


def listing(path: str) -> str:
    """List all of nf_tables; handles and sets' names show that nothing was made anew."""
    return inside(path, ["nft", "-sa", "list", "ruleset"])


def quick() -> Netfilter:
    """Return what programming takes; no program is started by it here."""
    return Netfilter(deadline=time.monotonic() + 20)


def silent(_level: str, _text: str) -> None:
    """Drop a line of the log."""


def program_here(wanted: CaptureConfig, existing: str = apply.REPLACE) -> list[str]:
    """Program the present namespace in this process; return what that changed."""
    return apply.program(quick(), wanted, silent, NATIVE, existing=existing).changed


def difference_here(wanted: CaptureConfig) -> str:
    """Return what CHECK would name in the present namespace."""
    return apply.check(quick(), wanted, apply.NFTABLES, {})


# -- rules that the kernel refuses -------------------------------------------------------------

BAD = {
    "jump to a chain that is not there": (
        Rule(Table.NAT, "ISTIO_OUTPUT", (), jump("ISTIO_NOWHERE")),
        r": `counter jump istio-nowhere`: No such file or directory",
    ),
    "more than 128 expressions": (
        Rule(Table.NAT, "ISTIO_OUTPUT", tuple(owner_uid(str(n)) for n in range(70)), jump("X")),
        r": `skuid 0 skuid 1 .* counter jump x`: Invalid argument$",
    ),
    "jump in a circle": (
        Rule(Table.NAT, "ISTIO_REDIRECT", (), jump("ISTIO_OUTPUT")),
        r": `.*counter jump istio-(redirect|output)`: Too many links$",
    ),
}


def with_bad_rule(wanted: CaptureConfig, bad: Rule) -> nfnetlink.Wanted:
    """Compile a configuration with a bad rule in the middle of its good ones."""
    families, rules = generate(wanted)
    middle = len(rules) // 2
    whole = Ruleset(families, (*rules[:middle], bad, *rules[middle:]))
    return nfnetlink.compiled(complete(whole))


@pytest.mark.parametrize("earlier", [False, True], ids=["first run", "re-run"])
@pytest.mark.parametrize("fault", BAD)
def test_refused_rule_is_named_and_nothing_is_done(netns: str, fault: str, earlier: bool) -> None:
    """The error has table, chain, number and text of the rule; what was there stays whole."""
    rule, words = BAD[fault]
    if earlier:
        program(netns, PLAIN)
    before = listing(netns)
    bad = with_bad_rule(WHOLE, rule)
    present = [name for name in OURS if f"table inet {name} " in before]

    def commit() -> None:
        with netlink.Ruleset() as kernel:
            kernel.commit(nfnetlink.transaction(bad.messages, present=present))

    with pytest.raises(ProgrammingFailed, match=words) as failure:
        call_inside(netns, commit)
    assert failure.value.msg.startswith("nf_tables refuses istio-proxy-nat istio-")
    assert listing(netns) == before
    assert bool(before) == earlier


def test_refused_rule_has_its_place_in_the_chain(netns: str) -> None:
    """The number is the one that a listing of the chain gives: the first rule has 1."""
    rule, _ = BAD["jump to a chain that is not there"]
    bad = with_bad_rule(PLAIN, rule)
    number = next(one.number for one in bad.messages if one.rule and "nowhere" in one.about)
    listed = [one for one in bad.messages if (one.kind, one.chain) == (NEWRULE, "istio-output")]
    assert "nowhere" in listed[number - 1].about
    with pytest.raises(ProgrammingFailed, match=f"istio-output rule {number}: "):
        run(netns, lambda net, log: commit_session(net, log, bad))


def commit_session(net: Netfilter, log: Log, wanted: nfnetlink.Wanted) -> apply.Report:
    """Do what the product does, with messages of the test's own."""
    with changing(net, log) as session:
        session.route(routing.wanted(WHOLE))
        session.commit(wanted)
        return apply.Report({}, session.changed)


@pytest.mark.parametrize("earlier", [False, True], ids=["first run", "re-run"])
def test_refusal_takes_addresses_and_routes_back(netns: str, earlier: bool) -> None:
    """They were there before the rules were sent."""
    if earlier:
        program(netns, PLAIN)
    before, rules = state(netns), listing(netns)
    bad = with_bad_rule(WHOLE, BAD["more than 128 expressions"][0])
    with pytest.raises(ProgrammingFailed, match="nf_tables refuses"):
        run(netns, lambda net, log: commit_session(net, log, bad))
    assert (state(netns), listing(netns)) == (before, rules)


# -- replies that are lost, or wrong -----------------------------------------------------------


def test_overflow_of_replies_is_no_verdict(netns: str) -> None:
    """So many errors that they do not fit: nobody can tell, so the tables must be read again."""
    wanted = compile_rules(PLAIN).messages

    def overflow() -> None:
        with netlink.Ruleset() as kernel:
            kernel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # noqa: SLF001
            without_tables = [one for one in wanted if one.kind != NEWTABLE]
            kernel.commit(nfnetlink.Batch(without_tables * 20))

    with pytest.raises(netlink.Unsettled, match="No buffer space available"):
        call_inside(netns, overflow)
    assert listing(netns) == ""


def around_batches(
    times: int,
    before: Callable[[bytes], bool],
    after: Callable[[], None] = lambda: None,
    *,
    guard: bool = False,
) -> None:
    """Do something around the first batches that the kernel gets; for children only.

    A batch for which `before` returns False is not sent. Those of the guard do not count, unless
    the test is about them.
    """
    send, left = socket.socket.sendto, times

    def hooked(this: socket.socket, data: bytes, address: tuple[int, int]) -> int:
        nonlocal left
        counts = guard or GUARD.name.encode() not in data
        if struct.unpack_from("=H", data, 4)[0] != BATCH_BEGIN or not left or not counts:
            return send(this, data, address)
        left -= 1
        sent = send(this, data, address) if before(data) else len(data)
        after()
        return sent

    socket.socket.sendto = hooked  # type: ignore[method-assign, assignment]


def lose_replies() -> None:
    """Fail as the kernel does when a batch was carried out but its replies found no room."""
    raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_guard_is_settled_by_looking(netns: str, carried_out: bool, times: int) -> None:
    """Its own batches may lose their replies, too; in the end it is gone."""
    program(netns, PLAIN)

    def work(net: Netfilter, log: Log) -> apply.Report:
        around_batches(times, lambda _: carried_out, lose_replies, guard=True)
        return apply.program(net, WHOLE, log, apply.Choice(apply.NFTABLES, "a test"))

    run(netns, work)
    assert check(netns, WHOLE, {}) == ""
    assert GUARD.name not in listing(netns)


@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("earlier", [False, True], ids=["first run", "re-run"])
@pytest.mark.parametrize("existing", [apply.REPLACE, apply.REWRITE])
def test_lost_replies_are_settled_by_looking(
    netns: str, carried_out: bool, earlier: bool, existing: str
) -> None:
    """Whether the batch was carried out shows in the tables; if not, it is sent again."""
    if earlier:
        program(netns, PLAIN)

    def work(net: Netfilter, log: Log) -> apply.Report:
        around_batches(1, lambda _: carried_out, lose_replies)
        choice = apply.Choice(apply.NFTABLES, "a test")
        return apply.program(net, WHOLE, log, choice, existing=existing)

    outcome = run(netns, work)
    assert "nf_tables" in outcome.changed
    assert check(netns, WHOLE, {}) == ""
    assert listing(netns).count("redirect to :15001") == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_lost_replies_and_then_a_failure_leave_the_former_back_end(
    netns: str, tmp_path: Path, variant: str
) -> None:
    """What was made without an answer goes, too, when iptables cannot be cleared after it."""
    program(netns, config(variant, BACKEND="iptables", **ALL_DNS))
    before = state(netns)
    wrap(tmp_path, f"iptables-{variant}-restore", f"{FIRST_TABLE_ONLY} exit 1")

    def work(net: Netfilter, log: Log) -> apply.Report:
        around_batches(1, lambda _: True, lose_replies)
        return apply.program(net, PLAIN, log, apply.Choice(apply.NFTABLES, "a test"))

    with pytest.raises(ProgrammingFailed, match="restore failed"):
        run(netns, work, wrappers=tmp_path)
    assert set(holders(netns).values()) == {variant}
    assert "istio-proxy" not in inside(netns, ["nft", "list", "tables"])
    assert state(netns) == before


def answer_falsely(code: int, kind: int) -> None:
    """Let the first batch be refused at its first message of a kind; for children only."""
    forged: list[bytes] = []
    receive = socket.socket.recvfrom

    def refuse(data: bytes) -> bool:
        at = 0
        while at < len(data):
            size, number = struct.unpack_from("=IH", data, at)
            if number == kind:
                header = data[at : at + 16]
                error = struct.pack("=IHHII", 36, 2, 0x100, *struct.unpack_from("=I", header, 8), 0)
                forged.append(error + struct.pack("=i", -code) + header)
                return False
            at += (size + 3) & ~3
        raise AssertionError("no message of this kind")

    def hooked(this: socket.socket, size: int, how: int) -> tuple[bytes, tuple[int, int]]:
        return (forged.pop(), (0, 0)) if forged else receive(this, size, how)

    around_batches(1, refuse)
    socket.socket.recvfrom = hooked  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ERESTART, BATCH_BEGIN),
        (errno.EINTR, BATCH_BEGIN),
        (errno.EAGAIN, BATCH_BEGIN),
        (errno.ENOENT, 10 << 8 | DELTABLE),
        (errno.EEXIST, 10 << 8 | NEWTABLE),
    ],
)
def test_what_changed_meanwhile_is_looked_at_again(netns: str, code: int, kind: int) -> None:
    """These answers say that the tables are not as they were read, no more."""
    program(netns, PLAIN)

    def work() -> list[str]:
        answer_falsely(code, kind)
        return program_here(WHOLE)

    assert "nf_tables" in call_inside(netns, work)
    assert check(netns, WHOLE, {}) == ""


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOMEM, errno.EOPNOTSUPP])
def test_other_answers_are_final(netns: str, code: int) -> None:
    """They are told as they are, once, and nothing is left of routes."""
    before = state(netns)

    def work(_net: Netfilter, log: Log) -> apply.Report:
        answer_falsely(code, BATCH_BEGIN)
        choice = apply.Choice(apply.NFTABLES, "a test")
        return apply.program(quick(), WHOLE, log, choice)

    with pytest.raises(ProgrammingFailed, match=f"nf_tables: {os.strerror(code)}"):
        run(netns, work)
    assert (listing(netns), state(netns)) == ("", before)


# -- others at work ----------------------------------------------------------------------------


def toggle_our_table(_batch: bytes) -> bool:
    """Delete our nat table if it is there, else make it; then the batch is sent."""
    table = ["table", "inet", OURS[0]]
    if subprocess.run(["nft", "delete", *table], capture_output=True, check=False).returncode:
        subprocess.run(["nft", "add", *table], check=True)
    return True


@pytest.mark.parametrize("earlier", [False, True], ids=["made", "deleted"])
@pytest.mark.parametrize("times", [1, 2, SETTLE_TRIES - 1])
def test_table_that_comes_or_goes_between_look_and_commit(
    netns: str, earlier: bool, times: int
) -> None:
    """The kernel refuses, we look again, and the rules are whole in the end."""
    if earlier:
        program(netns, PLAIN)

    def work() -> list[str]:
        around_batches(times, toggle_our_table)
        return program_here(WHOLE)

    assert "nf_tables" in call_inside(netns, work)
    assert check(netns, WHOLE, {}) == ""


def test_tables_that_never_hold_still_are_given_up(netns: str) -> None:
    """After a few tries the caller is told to try again; addresses and routes are taken back."""
    before = state(netns)

    def work(_net: Netfilter, log: Log) -> apply.Report:
        around_batches(100, toggle_our_table)
        choice = apply.Choice(apply.NFTABLES, "a test")
        return apply.program(quick(), WHOLE, log, choice)

    begin = time.monotonic()
    with pytest.raises(TryAgainLater, match="changed 5 times meanwhile") as failure:
        run(netns, work)
    assert time.monotonic() - begin < 5
    assert failure.value.code == 11
    assert state(netns) == before


def commits(number: int) -> int:
    """Commit two configurations in turn, reading each back; return how many were whole."""
    both = [compile_rules(wanted).messages for wanted in (PLAIN, WHOLE)]
    sizes: dict[int, int] = {}
    present: tuple[str, ...] = ()
    whole = 0
    with netlink.Ruleset() as kernel:
        for turn in range(number):
            wanted = both[turn % 2]
            kernel.commit(nfnetlink.transaction(wanted, present=present))
            present = tuple(dict.fromkeys(one.table for one in wanted))
            found = kernel.dump(OURS)
            if turn % 20 < 2:
                assert nfdump.difference(nfdump.read(found), wanted) == ""
            whole += len(found) == sizes.setdefault(turn % 2, len(found))
    return whole


def test_others_that_change_their_tables_do_not_matter(netns: str) -> None:
    """Hundreds of commits while somebody makes and deletes a table: none fails, none is half."""
    loop = "while nft add table inet foreign && nft delete table inet foreign; do echo; done"
    command = ["ip", "netns", "exec", os.path.basename(netns), "sh", "-c", loop]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        try:
            other.stdout.readline()
            assert call_inside(netns, commits, 300) == 300
            assert other.poll() is None
        finally:
            other.kill()
        assert len(other.stdout.readlines()) > 10


def test_signals_do_not_matter(netns: str) -> None:
    """A rain of signals with a handler, from the first message to the last."""

    def work() -> tuple[int, int]:
        caught = 0

        def count(_number: int, _frame: object) -> None:
            nonlocal caught
            caught += 1

        signal.signal(signal.SIGALRM, count)
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        try:
            return commits(200), caught
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    whole, caught = call_inside(netns, work)
    assert whole == 200
    assert caught > 200


def interrupt() -> None:
    """Do what the handler of SIGINT and SIGTERM does."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("carried_out", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("earlier", [False, True], ids=["first run", "re-run"])
def test_interrupted_run_is_all_or_nothing(netns: str, carried_out: bool, earlier: bool) -> None:
    """Whether the batch was carried out or not, rules, addresses and routes fit each other."""
    if earlier:
        program(netns, PLAIN)
    before = state(netns), listing(netns)

    def work(net: Netfilter, log: Log) -> apply.Report:
        around_batches(1, lambda _: carried_out, interrupt)
        return apply.program(net, WHOLE, log, apply.Choice(apply.NFTABLES, "a test"))

    with pytest.raises(IstioCNIError, match="KeyboardInterrupt"):
        run(netns, work)
    if (state(netns), listing(netns)) != before:
        assert check(netns, WHOLE, {}) == ""


# -- threads -----------------------------------------------------------------------------------


def here() -> int:
    """Identify the calling thread's network namespace."""
    return os.stat("/proc/thread-self/ns/net").st_ino


def own_ports(number: int) -> CaptureConfig:
    """Return a configuration that no other pod has."""
    return native(PROXY_PORT=str(20000 + number), INBOUND_CAPTURE_PORT=str(30000 + number))


def in_threads(paths: list[str], work: Callable[[int, str], None]) -> None:
    """Call a function for each namespace, on a few threads; all are at home before and after."""
    home = here()

    def visit(numbered: tuple[int, str]) -> None:
        assert here() == home
        number, path = numbered
        try:
            work(number, path)
        finally:
            assert here() == home, "a thread has not come home"

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(visit, enumerate(paths)))
    assert here() == home


def visit_and_program(number: int, path: str) -> None:
    """Program one namespace with its own ports; every third time the block fails afterwards."""
    netns = namespaces.open_netns(path)
    try:
        with namespaces.visiting(netns):
            assert here() == os.stat(path).st_ino
            program_here(own_ports(number))
            if number % 3 == 0:
                raise KeyError(number)
    except KeyError:
        assert number % 3 == 0
    finally:
        os.close(netns)


def test_many_pods_from_a_few_threads(new_netns: Callable[[], str]) -> None:
    """Each namespace gets its own rules and no other's, and every thread comes home."""
    paths = [new_netns() for _ in range(PODS)]
    call_inside(new_netns(), in_threads, paths, visit_and_program)
    for number, path in enumerate(paths):
        ports = {f"redirect to :{base + number}" for base in (20000, 30000)}
        text = listing(path)
        found = {line.strip() for line in text.split(" counter ") if line.startswith("redirect")}
        assert {line.split(" #")[0] for line in found} == ports
        assert " ::6/128" in inside(path, ["ip", "-o", "address", "show", "dev", "lo"])


def resources() -> tuple[int, int, int]:
    """Count the process's descriptors, threads, and threads that Python knows."""
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        threading.active_count(),
    )


def program_and_clean_up(number: int, path: str, rounds: int) -> None:
    """Program a namespace, program it anew and clean it up, over and over."""
    one, other = own_ports(number), native(**TPROXY, INBOUND_PORTS_INCLUDE="80")
    for _ in range(rounds):
        netns = namespaces.open_netns(path)
        with namespaces.visiting(netns):
            assert program_here(one)
            assert program_here(other)
            assert apply.clean_up(quick(), silent).changed
        os.close(netns)


def resources_of(paths: list[str], rounds: int) -> list[tuple[int, int, int]]:
    """Return what one round in each namespace leaves of this process, and what many rounds do."""
    found = []
    for number in (1, rounds):
        in_threads(paths, partial(program_and_clean_up, rounds=number))
        with contextlib.suppress(AssertionError):
            wait_until(lambda: resources()[1:] == (1, 1), "all threads have ended", 2)
        found.append(resources())
    return found


def test_hundreds_of_visits_leak_nothing(new_netns: Callable[[], str]) -> None:
    """Neither a descriptor nor a thread is left, nor a rule."""
    paths, home = [new_netns() for _ in range(THREADS)], new_netns()
    with ProcessPoolExecutor(1, FORK, enter, (home,)) as pool:
        before, after = pool.submit(resources_of, paths, -(-ROUNDS // THREADS)).result()
    assert after == before
    assert {listing(path) for path in (*paths, home)} == {""}


# -- interrupts --------------------------------------------------------------------------------


def interrupted(
    method: str, at: int, work: Callable[[], object], *, undone: bool = False, again: bool = False
) -> str:
    """Do something whose socket call number `at` is interrupted; "" if it has fewer.

    That is before the call where it is to stay undone, else after it; with `again`, at each later
    call, too.
    """
    real, left = getattr(socket.socket, method), at

    def hooked(*arguments: Any) -> object:
        nonlocal left
        left -= 1
        is_hit = left == -1 or (again and left < 0)
        if is_hit and undone:
            signal.raise_signal(signal.SIGINT)
        try:
            return real(*arguments)
        finally:
            if is_hit and not undone:
                signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    setattr(socket.socket, method, hooked)
    try:
        work()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(socket.socket, method, real)
    return "" if left >= 0 else "nobody saw the interrupt"


def interrupt_everywhere(method: str, undone: bool, again: bool) -> dict[int, tuple[str, int]]:
    """Interrupt a change of rules at each socket call; return what is odd, by the call's number."""
    odd: dict[int, tuple[str, int]] = {}

    def opened() -> int:
        wait_until(lambda: resources()[1] == 1, "sockets are closed", 2)
        return resources()[0]

    for at in range(200):
        program_here(WHOLE)
        program_here(PLAIN)
        before = opened()
        work = partial(program_here, WHOLE)
        outcome = interrupted(method, at, work, undone=undone, again=again)
        if not outcome:
            return odd
        more = opened() - before
        present = [wanted for wanted in (PLAIN, WHOLE) if not difference_here(wanted)]
        if more or not present or not outcome.startswith("KeyboardInterrupt"):
            odd[at] = outcome, more
    raise AssertionError("it has no end")


@pytest.mark.parametrize("again", [False, True], ids=["once", "on and on"])
@pytest.mark.parametrize("undone", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("method", ["recvfrom", "sendto"])
def test_an_interrupt_at_any_moment_leaves_one_state_or_the_other(
    netns: str, method: str, undone: bool, again: bool
) -> None:
    """The socket that was interrupted is also the one that brings the former state back."""
    assert call_inside(netns, interrupt_everywhere, method, undone, again) == {}


def leave_at(question: int, wanted: CaptureConfig) -> bool:
    """Program the present namespace for somebody who leaves at a question; tell whether they do."""
    asked = 0

    def may_commit() -> None:
        nonlocal asked
        asked += 1
        if asked > question:
            raise GivenUp("a test")

    net = Netfilter(deadline=time.monotonic() + 20, may_commit=may_commit)
    try:
        apply.program(net, wanted, silent, NATIVE)
    except TryAgainLater as left:
        is_done = isinstance(left, Interrupted)
    else:
        return False
    assert is_done == (not difference_here(wanted))
    return True


@pytest.mark.parametrize("programs", [False, True], ids=["alone", "beside iptables"])
@pytest.mark.parametrize(("old", "new"), [(PLAIN, WHOLE), (WHOLE, PLAIN)])
def test_who_leaves_a_change_gets_one_state_or_the_other(
    netns: str, old: CaptureConfig, new: CaptureConfig, programs: bool
) -> None:
    """Tables that were replaced cannot be taken back, so the routes that belong to them stay."""
    if programs:
        inside(netns, ["iptables-nft", "-t", "nat", "-A", "PREROUTING", "-p", "253"])

    def leave_everywhere() -> int:
        for question in range(20):
            program_here(old)
            if not leave_at(question, new):
                return question
            assert "" in (difference_here(old), difference_here(new)), question
        return 0

    assert call_inside(netns, leave_everywhere) >= 4


def test_errors_that_nobody_read_are_not_the_next_batch_s(netns: str) -> None:
    """An interrupt comes after a batch was refused, and before its errors are read."""
    rule, _ = BAD["jump to a chain that is not there"]
    bad, good = with_bad_rule(WHOLE, rule), compile_rules(WHOLE)

    def commit() -> str:
        with netlink.Ruleset() as kernel:
            outcome = interrupted("sendto", 0, partial(kernel.commit, bad.fresh))
            kernel.commit(good.fresh)
        return outcome

    assert call_inside(netns, commit).startswith("KeyboardInterrupt")
    assert all(f"table inet {name} " in listing(netns) for name in good.names)


# -- what is not there -------------------------------------------------------------------------


def without(name: str, number: int) -> None:
    """Take nf_tables away from this process; for children only."""
    for module in (tables_module, nfnetlink):
        if hasattr(module, name):
            setattr(module, name, number)


@pytest.mark.parametrize(
    ("name", "number"),
    [("NF_TABLES", NO_TABLES), ("_NETLINK_NETFILTER", NO_NETFILTER)],
    ids=["without nf_tables", "without netfilter's netlink"],
)
@pytest.mark.parametrize("verb", ["program", "check"])
def test_kernel_without_nf_tables_is_told(netns: str, name: str, number: int, verb: str) -> None:
    """The error is one of ours and names nf_tables; addresses and routes are as they were."""
    before = state(netns)

    def work(net: Netfilter, log: Log) -> apply.Report:
        without(name, number)
        if verb == "check":
            return apply.Report({}, [apply.check(net, WHOLE, apply.NFTABLES, {})])
        return apply.program(net, WHOLE, log, apply.Choice(apply.NFTABLES, "a test"))

    with pytest.raises(IstioCNIError, match="nf_tables") as failure:
        run(netns, work)
    assert isinstance(failure.value, ProgrammingFailed)
    assert "\n" not in failure.value.msg
    assert state(netns) == before


@pytest.mark.parametrize("name", ["NF_TABLES", "_NETLINK_NETFILTER"])
def test_clean_up_needs_no_nf_tables(netns: str, name: str) -> None:
    """Where the kernel has none there is nothing of ours in it."""
    number = NO_TABLES if name == "NF_TABLES" else NO_NETFILTER

    def work(net: Netfilter, log: Log) -> apply.Report:
        without(name, number)
        return apply.clean_up(net, log)

    assert run(netns, work).changed == []


def test_without_rights_there_is_one_line(netns: str) -> None:
    """It says what was refused and that root is needed; nothing is done."""
    before = state(netns)
    arguments = ["-i", "*", "-b", "*", "--backend", "nftables"]
    inside(netns, ["ip", "addr", "add", "10.9.0.1/24", "dev", "lo"])

    def work() -> tuple[int, str]:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return main.run(arguments, {}), said.getvalue()

    status, said = call_inside_as(APPLICATION, netns, work)
    assert status == 1
    assert said.startswith("istio-iptables: ")
    assert said.endswith("Operation not permitted; root is needed\n")
    assert said.count("\n") == 1
    inside(netns, ["ip", "addr", "del", "10.9.0.1/24", "dev", "lo"])
    clean_up(netns)
    assert (listing(netns), state(netns)) == ("", before)
