"""The iptables programs: find them, tell their variant, read and load tables.

The only module that starts programs: argument lists, text on standard input, a bounded wait after
which a program is ended with all it started, and an environment of our own (no library path of a
bundle, messages in English).

Source: istio tools/istio-iptables, pkg/dependencies; iptables(8), iptables-restore(8).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from istio_cni.constants import ROLLBACK_RESERVE_S, XTABLES_WAIT_S
from istio_cni.errors import ProgrammingFailed, TryAgainLater, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMAND_TIMEOUT_S = 10.0
WAIT_SINCE = (1, 6, 2)  # iptables-restore --wait
LOCKFILE_SINCE = (1, 8, 6)  # XTABLES_LOCKFILE
MISSING = "not found"
PROBE_CHAIN = "ISTIO_PROBE"
PROBE = (
    "* nat\n"
    f"-N {PROBE_CHAIN}\n"
    f"-A {PROBE_CHAIN} -p 255 -j RETURN\n"
    f"-F {PROBE_CHAIN}\n"
    f"-X {PROBE_CHAIN}\n"
    "COMMIT\n"
)
"""Asks the kernel for a nat table and takes the question back in the same transaction.

It tells whether the kernel supports a variant, and leaves no rule and no chain."""

MODULES = {
    ("legacy", 4): "ip_tables, iptable_nat, iptable_mangle, iptable_raw, xt_REDIRECT, xt_owner",
    ("legacy", 6): "ip6_tables, ip6table_nat, ip6table_mangle, ip6table_raw, xt_REDIRECT, xt_owner",
    ("nft", 4): "nf_tables, nft_compat, nft_chain_nat, xt_REDIRECT, xt_owner",
    ("nft", 6): "nf_tables, nft_compat, nft_chain_nat, xt_REDIRECT, xt_owner, nf_nat (IPv6)",
}


_VERSIONS: dict[tuple[str, int, int, int, int], tuple[str, tuple[int, ...]]] = {}


def load() -> None:
    """Load what starting programs takes, for processes that will see no files of ours later."""
    import subprocess  # noqa: F401
    import traceback  # noqa: F401 # for what should not happen


class CommandFailed(ProgrammingFailed):
    """A program could not be started or exited non-zero; `transient` when trying again may help."""

    def __init__(self, name: str, status: int | None, stderr: str) -> None:
        self.status = status
        self.stderr = stderr.strip()
        what = "could not be started" if status is None else f"exit status {status}"
        if status is not None and status < 0:
            what = f"killed by signal {-status}"
        super().__init__(f"{name} failed ({what}): {quoted(self.stderr or 'no message')}")

    @property
    def missing(self) -> bool:
        """Whether there is no such program at all."""
        return self.status is None and self.stderr == MISSING

    @property
    def lock_held(self) -> bool:
        """Whether another process holds the xtables lock."""
        return self.status == 4 and "xtables lock" in self.stderr

    @property
    def transient(self) -> bool:
        """Whether this passes by itself: the lock is held, or a table changed meanwhile."""
        lasting = ("Permission denied", "generation id", "does not exist", "you must be root")
        return self.status == 4 and not any(words in self.stderr for words in lasting)


class NeedsPrograms(Exception):
    """Work turned out to need programs of iptables, where none may be started."""


class Tool:
    """One usable set of programs for a family: `iptables-nft`, its `-save` and its `-restore`."""

    __slots__ = ("family", "name", "restore", "save", "variant", "version")

    def __init__(
        self,
        name: str,
        family: int,
        save: str,
        restore: str,
        variant: str,
        version: tuple[int, ...],
    ) -> None:
        self.name = name
        self.family = family
        self.save = save
        self.restore = restore
        self.variant = variant
        self.version = version

    @property
    def modules(self) -> str:
        """The kernel modules this variant needs, for messages."""
        return MODULES[self.variant, self.family]

    @property
    def is_locked_by_path(self) -> bool:
        """Whether it takes the lock at a fixed path, and no other way is to be had."""
        return self.variant == "legacy" and self.version < LOCKFILE_SINCE


class Netfilter:
    """Runs iptables programs in the present network namespace until a deadline.

    After `deadline` there is time for a roll-back until `rollback_deadline`. `lock_file` is a file
    unique to the namespace (its path) in CNI mode, "" otherwise: then the node-wide xtables lock is
    waited for, `lock_wait_s` seconds. `keep` is a descriptor that programs inherit, so that the
    apply lock outlives a killed parent until they have ended. `may_commit` is called right before
    every change, and raises where nobody wants it any more; None: somebody does in any case. Who
    finds all time over, since it was stopped, has `late_s` for a roll-back. With
    `prove`, what was loaded is read back also where there was nothing before. Who may not start
    programs gets NeedsPrograms where one would be, which is before any change.
    """

    __slots__ = (
        "_found",
        "_may_start",
        "_shadow",
        "deadline",
        "keep",
        "late_s",
        "lock_file",
        "lock_wait_s",
        "may_commit",
        "prove",
        "rollback_deadline",
        "search_path",
    )

    def __init__(
        self,
        *,
        deadline: float,
        rollback_deadline: float | None = None,
        search_path: str = SEARCH_PATH,
        lock_file: str = "",
        lock_wait_s: int = XTABLES_WAIT_S,
        shadow_lock: Callable[[str], bool] | None = None,
        may_commit: Callable[[], None] | None = None,
        prove: bool = True,
        may_start_programs: bool = True,
        late_s: float = 0.0,
    ) -> None:
        self._may_start = may_start_programs
        self.prove = prove
        self.late_s = late_s
        self.may_commit = may_commit
        self.deadline = deadline
        self.rollback_deadline = rollback_deadline or deadline + ROLLBACK_RESERVE_S
        self.search_path = search_path
        self.lock_file = lock_file
        self.lock_wait_s = lock_wait_s
        self.keep: int | None = None
        self._shadow = shadow_lock
        self._found: dict[str, Tool] = {}
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            with suppress(ValueError):  # inherited; exit statuses would be lost (main thread only)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    @staticmethod
    def modules(variant: str, family: int) -> str:
        """Name the kernel modules that a variant needs for a family, for messages."""
        return MODULES[variant, family]

    def any_program(self) -> str:
        """Return the path of a program of iptables that is there, "" for none."""
        for name in ("iptables-nft", "iptables", "iptables-legacy"):
            with suppress(CommandFailed):
                return self._which(f"{name}-restore")
        return ""

    def find(self, name: str, family: int) -> Tool:
        """Return the programs called `name`; CommandFailed tells why they are no use.

        The variant is in the name, or else in the version text; a program that cannot tell its
        version is a very old iptables-legacy.
        """
        if name not in self._found:
            save, restore = self._which(f"{name}-save"), self._which(f"{name}-restore")
            variant, version = self._known_version(name, save)
            self._found[name] = Tool(name, family, save, restore, variant, version)
        return self._found[name]

    def _known_version(self, name: str, save: str) -> tuple[str, tuple[int, ...]]:
        """Return variant and version; a program that was asked in this process is not asked again.

        Another one may take its place: what tells files apart is part of what is known.
        """
        if name.endswith("-nft"):
            return "nft", ()
        try:
            status = os.stat(save)
        except OSError as error:  # it went a moment ago
            raise CommandFailed(f"{name}-save", None, error.strerror or str(error)) from error
        file = save, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
        if file not in _VERSIONS:
            _VERSIONS[file] = self._version(name, save)
        return _VERSIONS[file]

    def _version(self, name: str, save: str) -> tuple[str, tuple[int, ...]]:
        status, text, complaint = self._run([save, "--version"], name=f"{name}-save")
        if status in (126, 127):
            raise CommandFailed(f"{name}-save", status, complaint)
        if status != 0 or "unrecognized option" in complaint:  # some exit with 0 all the same
            return "legacy", (0, 0, 0)
        return parse_version(text)

    def save(self, tool: Tool) -> str:
        """Return the `-save` text of all tables of a family."""
        name = f"{tool.name}-save"
        status, text, complaint = self._run([tool.save], name=name, env=self._environment(tool))
        if status != 0:
            raise CommandFailed(name, status, complaint)
        return text

    def load(self, tool: Tool, text: str) -> None:
        """Load restore text; tables are committed one by one: a failure may leave some."""
        name, argv, wait = self._restore(tool)
        environment = self._environment(tool)
        status, _, complaint = self._run(argv, name=name, stdin=text, env=environment, wait=wait)
        if status != 0:
            raise CommandFailed(name, status, complaint)

    def load_together(self, loads: list[tuple[Tool, str]]) -> list[CommandFailed | None]:
        """Load texts by several programs at a time; return why each failed, None if it did not.

        The texts must be short: none is to wait for the program before it.
        """
        started = []
        for tool, text in loads:
            name, argv, wait = self._restore(tool)
            program = self._start(argv, name, self._environment(tool))
            if program.stdin is not None:
                with suppress(BrokenPipeError), program.stdin as stdin:
                    stdin.write(_encoded(text))
                program.stdin = None
            started.append((program, name, wait))
        failures: list[CommandFailed | None] = []
        for program, name, wait in started:
            status, _, complaint = self._finish(program, name, "", wait)
            failures.append(CommandFailed(name, status, complaint) if status != 0 else None)
        return failures

    def _restore(self, tool: Tool) -> tuple[str, list[str], int]:
        """Return how restore text is loaded: name, arguments, seconds that it may wait itself."""
        argv, wait = [tool.restore, "--noflush"], 0
        if tool.variant == "legacy" and tool.version >= WAIT_SINCE:
            wait = self.lock_wait_s
            argv.append(f"--wait={wait}")
        if self._shadow and self.lock_file and tool.is_locked_by_path:
            self._shadow(self.lock_file)
            self._shadow = None  # once is enough for this sandbox
        return f"{tool.name}-restore", argv, wait

    def _environment(self, tool: Tool) -> dict[str, str]:
        if self.lock_file and tool.variant == "legacy" and tool.version >= LOCKFILE_SINCE:
            return {"XTABLES_LOCKFILE": self.lock_file}
        return {}

    def _which(self, program: str) -> str:
        reason = MISSING
        for directory in self.search_path.split(":"):
            path = os.path.join(directory, program)
            if not directory or not os.path.isfile(path):
                continue
            if os.access(path, os.X_OK):
                return path
            reason = f"{path} is not executable"
        raise CommandFailed(program, None, reason)

    def _run(
        self,
        argv: list[str],
        *,
        name: str,
        stdin: str = "",
        env: dict[str, str] | None = None,
        wait: int = 0,
    ) -> tuple[int, str, str]:
        """Run a program; return exit status, standard output and standard error.

        Raises CommandFailed if it cannot be started, TryAgainLater if it does not end in time; then
        it is killed with its whole process group.
        """
        return self._finish(self._start(argv, name, env or {}), name, stdin, wait)

    def _start(self, argv: list[str], name: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        import subprocess  # captured pods with the iptables back end only

        if not self._may_start:
            raise NeedsPrograms
        if self.deadline <= time.monotonic():
            raise TryAgainLater(f"no time left to run {name}")
        try:
            return subprocess.Popen(  # noqa: S603 - found in a search path, no shell
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": self.search_path, "LC_ALL": "C", **env},
                pass_fds=() if self.keep is None else (self.keep,),
                process_group=0,
            )
        except OSError as error:
            raise CommandFailed(name, None, error.strerror or str(error)) from error

    def _finish(
        self, program: subprocess.Popen[bytes], name: str, stdin: str, wait: int
    ) -> tuple[int, str, str]:
        import subprocess  # captured pods with the iptables back end only

        limit = min(max(0.0, self.deadline - time.monotonic()), COMMAND_TIMEOUT_S + wait)
        with program:
            try:
                done = program.communicate(_encoded(stdin), timeout=limit)
            except BaseException as error:  # time is over, or an interrupt
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise TryAgainLater(f"{name} did not end within {limit:.1f} s") from error
                raise
        return program.returncode, _decoded(done[0]), _decoded(done[1])


def _encoded(text: str) -> bytes:
    """Write text as it was read: comments of other people's rules may be in any encoding."""
    return text.encode("utf-8", "surrogateescape")


def _decoded(data: bytes) -> str:
    """Read a program's output without touching its line ends."""
    return data.decode("utf-8", "surrogateescape")


def parse_version(text: str) -> tuple[str, tuple[int, ...]]:
    """Read variant and version from `iptables v1.8.9 (nf_tables)`; else an old legacy."""
    word = next(
        (word for word in text.split() if word[:1] == "v" and word[1:2].isdigit()), "v0.0.0"
    )
    numbers = tuple(int(part) for part in word[1:].split(".") if part.isdigit())
    return ("nft" if "nf_tables" in text else "legacy"), numbers
