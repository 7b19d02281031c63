"""One change to a namespace, alone: the lock, what is there, addresses and routes, our own tables.

Only one session at a time works in a namespace. What it did to addresses and routes is taken back
when it fails; our nf_tables tables change in one batch, which needs no way back.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from istio_cni import constants
from istio_cni.capture import routing
from istio_cni.capture.backend import guard_stands, may_hold_iptables, ours_native
from istio_cni.edge import netlink
from istio_cni.edge.netfilter import Netfilter
from istio_cni.edge.netns import hold_apply_lock
from istio_cni.errors import GivenUp, Interrupted, IstioCNIError, ProgrammingFailed, TryAgainLater

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket

    from istio_cni.rules.nfnetlink import Batch, Message, Wanted

Log = Callable[[str, str], None]
REFUSE, REPLACE, REWRITE = "refuse", "replace", "rewrite"  # what to do with rules of ours
ROLLBACK_S = constants.ROLLBACK_RESERVE_S + 0.5  # and the time to tell
SETTLE_TRIES, SETTLE_PAUSE_S = 5, 0.01


class Place(NamedTuple):
    """A namespace that one session has for itself: the lock, and what nf_tables holds there.

    `kernel` is None without nf_tables.
    """

    lock: socket
    kernel: netlink.Ruleset | None
    tables: tuple[netlink.Listed, ...]


class Session:
    """A change to a namespace in which iptables holds nothing."""

    def __init__(self, net: Netfilter, log: Log, place: Place) -> None:
        self.net = net
        self.log = log
        self.changed: list[str] = []
        self._place = place
        self.native = ours_native(place.tables)
        self.guarded = guard_stands(place.tables)
        self.native_made = False
        self.target: dict[str, str] | None = None
        self.missing: list[IstioCNIError] = []  # why tables of iptables cannot be read
        self.former_routing: routing.Routing | None = None
        self._turning_back = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        self._turning_back = True
        stays = False
        with uninterrupted():
            try:
                with suppress(IstioCNIError):  # who cannot read the tables does not know
                    stays = self.may_stay(error) and self.is_whole()
                if not stays:
                    self.revert(error)
            finally:
                self._take_down_guard()  # an interrupt may have come while that was done
        if stays and isinstance(error, GivenUp):
            raise Interrupted(
                "all was done when whoever asked had gone; repeating the call finds it done"
            ) from error

    @property
    def kernel(self) -> netlink.Ruleset:
        """What our own tables are in. Raises NoNftables."""
        if self._place.kernel is None:
            raise netlink.NoNftables
        return self._place.kernel

    def tables(self) -> tuple[netlink.Listed, ...]:
        """List the tables of nf_tables; none where the kernel has none."""
        try:
            return self.kernel.tables()
        except netlink.NoNftables:
            return ()

    def refuse_unread(self) -> None:
        """Raise if there may be rules of ours that cannot be read."""

    def remove_programs_rules(self) -> None:
        """Remove what we have programmed through iptables."""

    def refuse_programs_rules(self) -> None:
        """Refuse to replace what we have programmed through iptables."""

    def refuse_native(self) -> None:
        """Refuse to replace what our own back end has made."""
        for name in self.native:
            raise other_rules(f"the back end nftables has made {constants.NFT_FAMILY} {name}")

    def refuse_other(self, wanted: Wanted) -> None:
        """Refuse to replace tables of ours that another configuration made; name a difference."""
        if self.native and set(self.native.values()) != {wanted.comment}:
            found = rules_difference(self.kernel, wanted.messages)
            if found:  # kernels before 5.10 keep no comments
                raise other_rules(found)

    def route(self, target: routing.Routing) -> None:
        """Make addresses, policy rules and routes what is wanted."""
        with netlink.Route() as route:
            present = routing.read(route, target)
            if not routing.difference(present, target):
                return
            self.former_routing = present
            self.confirm()
            routing.apply(route, present, target)
        self.changed.append("addresses and routes")

    def confirm(self) -> None:
        """Raise if nobody wants the next change any more."""
        if self.net.may_commit is not None and not self._turning_back:
            self.net.may_commit()

    def commit(self, wanted: Wanted, *, rewrite: bool = False) -> None:
        """Make our tables hold these rules and nothing else, in one batch; nothing if they do.

        Where it cannot be told whether a batch was carried out, or the tables were not as they were
        read, they are read again, a few times. No connection can begin while tables are replaced.
        """
        try:
            self._commit(wanted, rewrite=rewrite)
        finally:
            self._take_down_guard()

    def _commit(self, wanted: Wanted, *, rewrite: bool) -> None:
        if not rewrite and self._holds(wanted):
            return
        self.changed.append("nf_tables")
        had = bool(self.native)
        self.native_made = bool(wanted.messages) and not had
        self.target = wanted.names
        if had and wanted.messages:
            self._put_up_guard()
        self._settle(lambda: wanted.replacing(self.native), lambda _: self._holds(wanted))
        self.native = self.target

    def remove_native(self) -> None:
        """Remove our tables, if there are any."""
        if self.native or self.guarded:
            from istio_cni.rules.nfnetlink import NOTHING  # where we have tables only

            self.commit(NOTHING)

    def forget_native(self) -> None:
        """Take back the tables that this session has made."""
        self.native = ours_native(self.tables())
        self.remove_native()

    def _put_up_guard(self) -> None:
        from istio_cni.rules.nfnetlink import messages, transaction  # tables that are replaced only
        from istio_cni.rules.nftables import GUARD

        if not self.guarded:
            self.guarded = True  # whatever comes: it is to go again
            guard = transaction(messages([GUARD]))
            self._settle(lambda: guard, guard_stands)
        netlink.wait_for_packets()

    def _take_down_guard(self) -> None:
        """Let connections begin again, also where a killed run has left the guard."""
        if not self.guarded:
            return
        from istio_cni.rules.nfnetlink import transaction  # tables that are replaced only

        netlink.wait_for_packets()
        removal = transaction((), present=[constants.NFT_GUARD])
        self._settle(lambda: removal, lambda tables: not guard_stands(tables))
        self.guarded = False

    def _settle(
        self, batch: Callable[[], Batch], is_done: Callable[[tuple[netlink.Listed, ...]], bool]
    ) -> None:
        """Send a batch; where its end is not known, look at the tables and send it again."""
        for _ in range(SETTLE_TRIES):
            try:
                return self._commit_batch(batch())
            except netlink.Unsettled as unsettled:
                self.log("debug", f"{unsettled.msg}; looking again")
            time.sleep(SETTLE_PAUSE_S)
            tables = self.tables()
            self.native = ours_native(tables)
            if is_done(tables):
                return None
        raise TryAgainLater(f"nf_tables tables of ours changed {SETTLE_TRIES} times meanwhile")

    def _commit_batch(self, batch: Batch) -> None:
        """Send a batch; where somebody may give up meanwhile, only if nothing has changed since.

        Whoever gave up goes on without us: a batch that was held up must not undo that.
        """
        generation = 0 if self.net.may_commit is None else self.kernel.generation()
        self.confirm()
        self.kernel.commit(batch, generation)

    def _holds(self, wanted: Wanted) -> bool:
        if self.native != wanted.names:
            return False
        return not wanted.messages or not rules_difference(self.kernel, wanted.messages)

    def is_whole(self) -> bool:
        """Tell whether all is done: our tables come last, and are what they are to be.

        An interrupt may come after the batch was carried out.
        """
        return self.target is not None and self.target == ours_native(self.tables())

    def may_stay(self, error: BaseException) -> bool:
        """Tell whether what is done may stay; tables that were replaced cannot be taken back."""
        return not (isinstance(error, GivenUp) and self.native_made)

    def revert(self, error: BaseException) -> None:
        """Bring everything back to what it was."""
        try:
            if isinstance(error, GivenUp) and self.native_made:
                self.forget_native()
            if self.former_routing is not None:
                with netlink.Route() as route:
                    routing.revert(route, self.former_routing)
        except IstioCNIError as second:
            lost = f"the former state could not be restored ({second.msg})"
            raise ProgrammingFailed(f"{one_line(error)}; {lost}") from error


def rules_difference(kernel: netlink.Ruleset, wanted: tuple[Message, ...]) -> str:
    """Return the first thing in which our tables in the kernel differ from what is wanted."""
    from istio_cni.rules import nfdump  # a second run, or a CHECK

    return nfdump.difference(nfdump.read(kernel.dump(constants.NFT_TABLES)), wanted)


def other_rules(what: str) -> ProgrammingFailed:
    """Build the refusal to replace rules of ours that are not asked for."""
    return ProgrammingFailed(
        f"other rules of ours are in place: {what}; replace them with --reconcile"
    )


def one_line(error: BaseException) -> str:
    """Return what an error says, in a line."""
    return error.msg if isinstance(error, IstioCNIError) else f"{type(error).__name__}: {error}"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have the signals that end a program wait for the end of a block."""
    later = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, later)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def alone(net: Netfilter) -> Iterator[Place]:
    """Keep every other session of ours out of the present namespace, and look at its tables."""
    with ExitStack() as stack:
        lock = stack.enter_context(hold_apply_lock(net.deadline, net.may_commit))
        kernel: netlink.Ruleset | None = None
        tables: tuple[netlink.Listed, ...] = ()
        with suppress(netlink.NoNftables):
            ruleset = stack.enter_context(netlink.Ruleset())
            tables, kernel = ruleset.tables(), ruleset
        yield Place(lock, kernel, tables)


@contextmanager
def changing(net: Netfilter, log: Log) -> Iterator[Session]:
    """Work alone in the present namespace; what the block does is undone if it fails.

    Programs are started only where iptables has tables.
    """
    with alone(net) as place:
        session = Session(net, log, place)
        if may_hold_iptables(place.tables):
            from istio_cni.capture.transaction import Run  # not where nf_tables is all there is

            session = Run(net, log, place)
        with session:
            yield session
