"""One change to a namespace: all of it, or after any failure what was there before.

Only one transaction at a time works in a namespace. What it replaces under traffic it replaces
table by table in single commits, with drop rules in front where that is not enough; they also stay
when the former state cannot be brought back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from istio_cni.capture import routing
from istio_cni.capture.session import Log, Place, Session, alone, one_line, other_rules
from istio_cni.capture.tools import (
    BASE,
    NFT_FAMILY,
    Held,
    candidates,
    find,
    has_tables,
    load,
    lock_held,
    none_works,
    survey,
    works,
)
from istio_cni.edge import netlink
from istio_cni.edge.netfilter import CommandFailed, Netfilter, Tool
from istio_cni.errors import IstioCNIError, ProgrammingFailed, TryAgainLater
from istio_cni.rules import state as tables_of
from istio_cni.rules.iptables import block, parse_save
from istio_cni.rules.model import Family, Ruleset, Table
from istio_cni.rules.state import State, differences, ours

SHORT = 32_768  # bytes of a text that a pipe takes at once
ROLLBACK_SHARE = 0.7  # of what is left then; the rest is for the drop rules, if it fails


class Run(Session):
    """A change that may touch both families and both variants of iptables, too."""

    def __init__(self, net: Netfilter, log: Log, place: Place) -> None:
        super().__init__(net, log, place)
        self.touched: dict[tuple[Family, str], Held] = {}
        self.nft_before = {(table.family, table.name) for table in place.tables}

    def __enter__(self) -> Run:
        self.net.keep = self._place.lock.fileno()
        try:
            tables = self._place.tables
            found = {family: survey(self.net, family, tables) for family in Family}
        except BaseException:
            self.net.keep = None
            raise
        self.held = {family: each.held for family, each in found.items()}
        unread = [reason for each in found.values() for reason in each.unread.values()]
        self.unread = [reason for reason in unread if not reason.missing]
        self.missing += (reason for reason in unread if reason.missing)
        for reason in self.unread:
            self.log("warn", f"rules that may be here cannot be read and stay: {reason.msg}")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self.net.keep = None

    def refuse_unread(self) -> None:
        """Raise if a variant's tables could not be read: nobody knows what stays in them."""
        for reason in self.unread:
            raise ProgrammingFailed(f"rules that may be here cannot be read: {reason.msg}")

    def refuse_programs_rules(self) -> None:
        """Refuse to replace rules of ours that a variant of iptables holds."""
        for family, variants in self.held.items():
            for variant, held in variants.items():
                if ours(held.state):
                    raise other_rules(f"the back end iptables has made {BASE[family]} ({variant})")

    def remove_programs_rules(self) -> None:
        """Remove our objects from every variant, and the tables that are empty then."""
        self.remove_ours(keep=set())
        self.sweep()

    def load_together(self, texts: Mapping[Family, str], forced: str) -> dict[Family, str]:
        """Load all families at the same time into a namespace in which no variant has anything.

        Returns the variant of each; none where that is not possible, or has failed and been undone:
        one after the other there are more variants and tries.
        """
        if self.net.prove or self.missing or self.unread or any(self.held.values()):
            return {}
        loads = {}
        for family, text in texts.items():
            with suppress(CommandFailed):
                tool = self.net.find(candidates(family, forced, {})[0], family.value)
                loads[family] = (tool, text)
        if len(loads) < len(texts) or any(len(text) > SHORT for text in texts.values()):
            return {}
        self.confirm()
        self.touched |= {
            (family, tool.variant): Held(tool, {}) for family, (tool, _) in loads.items()
        }
        failed = any(self.net.load_together(list(loads.values())))
        tables = self.tables()
        if failed or not all(
            has_tables(tool.variant, each, tables) for each, (tool, _) in loads.items()
        ):
            self._take_back(loads)
            return {}
        used = {family: tool.variant for family, (tool, _) in loads.items()}
        self.changed += (f"{BASE[family]} ({variant})" for family, variant in used.items())
        return used

    def _take_back(self, loads: dict[Family, tuple[Tool, str]]) -> None:
        """Undo what some of several loads have done."""
        for family, (tool, _) in loads.items():
            for document in tables_of.revert_blocks(self._now(tool), {}):
                load(self.net, tool, document)
            del self.touched[family, tool.variant]
        self._sweep(set(netlink.IPTABLES_TABLES) - self.nft_before)

    def load(self, family: Family, forced: str, ruleset: Ruleset, *, rewrite: bool) -> str:
        """Make the first candidate that works hold a family's rules; return its variant.

        One that fails is passed over only if it cannot work here; what it did is undone first.
        """
        refused: dict[str, CommandFailed] = {}
        for name in candidates(family, forced, self.held[family]):
            held = None
            try:
                held = find(self.net, name, family, forced, self.held[family])
                self._load_rules(family, held, ruleset, rewrite=rewrite)
            except CommandFailed as error:
                if error.lock_held:
                    raise lock_held(error) from error
                if held is not None:
                    error = self._blamed(family, held, error)
                refused[name] = error
            else:
                return held.tool.variant
        raise none_works(family, forced, refused)

    def _load_rules(self, family: Family, held: Held, ruleset: Ruleset, *, rewrite: bool) -> None:
        target = tables_of.wanted(ruleset, family)

        def text(state: State) -> str:
            changed = set(target) | set(ours(state)) if rewrite else set(differences(state, target))
            return tables_of.load_text(state, ruleset, family, changed)

        if self._load(family, held.tool, held.state, text):
            if self.net.prove or held.state:
                self._prove(family, held.tool, target)
            elif not has_tables(held.tool.variant, family, self.tables()):
                raise CommandFailed(f"{held.tool.name}-restore", 0, "it succeeded without a table")

    def _prove(self, family: Family, tool: Tool, target: State) -> None:
        """Read back what was loaded; a program that succeeds without doing it is no success."""
        present = self._now(tool)
        for text in differences(present, target).values():
            raise CommandFailed(f"{tool.name}-restore", 0, f"it succeeded, but {text}")
        for text in tables_of.obstacles(present):
            self.log(
                "warn", f"a rule of somebody else stands in front of ours: {BASE[family]} {text}"
            )

    def _blamed(self, family: Family, held: Held, error: CommandFailed) -> CommandFailed:
        """Return why a variant cannot work here; raise if it can, or holds rules of ours."""
        tool, former = held
        if ours(former):
            raise _explained(error, tool) from error
        reason = works(self.net, tool)
        if reason is None:
            raise _explained(error, tool) from error
        try:
            now = self._now(tool)
        except CommandFailed:  # what cannot even read has not loaded either
            now = former
        for document in tables_of.revert_blocks(now, former):
            load(self.net, tool, document)
        self._sweep(set(netlink.IPTABLES_TABLES) - self.nft_before)
        del self.touched[family, tool.variant]
        return reason

    def remove_ours(self, keep: set[tuple[Family, str]]) -> None:
        """Remove our objects from every variant that is not to be kept."""
        for family, variants in self.held.items():
            for variant, (tool, present) in variants.items():
                if (family, variant) not in keep and ours(present):
                    captured = self.native_made or any(family is kept for kept, _ in keep)
                    text = _removal if captured else _guarded_removal
                    try:
                        self._load(family, tool, present, text)
                    except CommandFailed as error:
                        raise _explained(error, tool) from error

    def _load(
        self, family: Family, tool: Tool, present: State, text: Callable[[State], str]
    ) -> bool:
        """Load what `text` makes of the present state; tell whether there was anything to load.

        It is read and tried again while that may help.
        """
        document = text(present)
        if not document:
            return False
        self.confirm()
        self.touched.setdefault((family, tool.variant), Held(tool, present))
        load(self.net, tool, document, lambda: text(self._now(tool)))
        self.changed.append(f"{BASE[family]} ({tool.variant})")
        return True

    def warn_of_broken(self, family: Family) -> None:
        """Warn if a family that this pod does not need could not be programmed; never fail."""
        if self.held[family]:
            return
        reason = ""
        for name in (f"{BASE[family]}-nft", BASE[family], f"{BASE[family]}-legacy"):
            try:
                self.net.save(self.net.find(name, family.value))
            except CommandFailed as error:
                reason = error.msg
            except TryAgainLater as error:
                reason = error.msg
                break
            else:
                return
        self.log(
            "warn", f"IPv{family.value} could not be captured here, nor is it asked for: {reason}"
        )

    def sweep(self) -> None:
        """Delete the tables that iptables-nft leaves empty where objects of ours were removed.

        The drop rules may have made a `filter` table just for themselves.
        """
        empty: set[tuple[str, str]] = set()
        for (family, variant), former in self.touched.items():
            if variant == "nft":
                kind = NFT_FAMILY[family]
                empty |= {(kind, table.value) for table in ours(former.state)}
                empty |= {(kind, Table.FILTER.value)} - self.nft_before
        if empty:
            self._sweep(empty)

    def _sweep(self, tables: set[tuple[str, str]]) -> None:
        """Delete those of some tables that are empty; one that stays does no harm."""
        try:
            netlink.sweep_empty_tables(tuple(tables))
        except IstioCNIError as error:
            self.log("warn", f"empty tables may be left: {error.msg}")

    def may_stay(self, error: BaseException) -> bool:
        """Tell whether what is done may stay: not while iptables may hold rules of ours, too."""
        return not self.native_made

    def revert(self, error: BaseException) -> None:
        """Bring the former state back; where that fails, shut the namespace and say so.

        The last change goes first, so that where one variant took over from the other there is
        always one that captures.
        """
        start, end = time.monotonic(), self.net.rollback_deadline
        if start >= end:
            end = start + self.net.late_s
        self.net.deadline = start + ROLLBACK_SHARE * (end - start)
        try:
            if self.former_routing is not None:
                with netlink.Route() as route:
                    routing.revert(route, self.former_routing)
            for tool, former in reversed(self.touched.values()):
                for document in tables_of.revert_blocks(self._now(tool), former):
                    load(self.net, tool, document)
            if self.native_made:
                self.forget_native()
        except Exception as second:
            self.net.deadline = end
            lost = f"the former state could not be restored ({one_line(second)}); {self._shut()}"
            raise ProgrammingFailed(f"{one_line(error)}; {lost}") from error
        finally:
            self._sweep(set(netlink.IPTABLES_TABLES) - self.nft_before)

    def _now(self, tool: Tool) -> State:
        return parse_save(self.net.save(tool))

    def _shut(self) -> str:
        """Put drop rules in front of everything; say whether that worked."""
        try:
            for tool, _ in self.touched.values():
                if Table.FILTER not in ours(self._now(tool)):
                    load(self.net, tool, block(Table.FILTER, tables_of.guard_lines()))
        except Exception as error:
            return f"drop rules could not be put in place either ({one_line(error)})"
        return "drop rules are in place and all traffic stops until it is programmed again"


@contextmanager
def running(net: Netfilter, log: Log) -> Iterator[Run]:
    """Work alone in the present namespace, with iptables at hand; a failure undoes it all."""
    with alone(net) as place, Run(net, log, place) as run:
        yield run


def _removal(state: State) -> str:
    """Return restore text that removes everything of ours from a variant."""
    return "".join(tables_of.undo_blocks(state))


def _guarded_removal(state: State) -> str:
    """Return the same with drop rules around, if that takes more than one table.

    A failure half way must not let traffic past the proxy before the former state is back.
    """
    blocks = tables_of.undo_blocks(state)
    if len(blocks) > 1 and Table.FILTER not in ours(state):
        blocks.insert(0, block(Table.FILTER, tables_of.guard_lines()))
        blocks.append(block(Table.FILTER, tables_of.guard_removal_lines()))
    return "".join(blocks)


def _explained(error: CommandFailed, tool: Tool) -> IstioCNIError:
    if error.lock_held:
        return lock_held(error)
    hint = f"IPv{tool.family} with {tool.name} needs the kernel modules {tool.modules}"
    return ProgrammingFailed(f"{error.msg}; {hint}")
