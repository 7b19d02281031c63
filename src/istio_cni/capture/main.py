"""`istio-iptables`: render, apply, clean up and validate capture rules where it is started.

Runs in an init container with NET_ADMIN, or by hand; the plugin does the same work through `apply`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from istio_cni.capture import detect
from istio_cni.capture.backend import NFTABLES
from istio_cni.capture.flags import COMPLETE, TEXT
from istio_cni.capture.options import Options, read_options
from istio_cni.errors import (
    CaptureNotWorking,
    InternalError,
    InvalidParameter,
    IOFailure,
    IstioCNIError,
    as_ours,
)
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.iptables import render
from istio_cni.rules.model import Family, Ruleset
from istio_cni.rules.sidecar import generate

CLI_TIMEOUT_S = 120.0  # waiting for the xtables lock included
VALIDATION_FAILED = 126  # the node's repair looks for this status
_LEVELS = {"none": 100, "fatal": 50, "error": 40, "warn": 30, "info": 20, "debug": 10}
log = logging.getLogger("istio-iptables")


def main() -> int:
    """Run the program with the process's arguments; return its exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half done is undone
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 # closed by whoever started us
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    return run(sys.argv[1:], os.environ)


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do what arguments and environment say; one line on stderr for a failure."""
    try:
        options = read_options(arguments, environ)
        _configure_logging(options)
        for warning in options.warnings:
            log.warning(warning)
        _act(options, environ)
    except CaptureNotWorking as error:
        _complain(error)
        return VALIDATION_FAILED
    except IstioCNIError as error:
        _complain(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        _complain(as_ours(error))
        return 1
    return 0


def _complain(error: IstioCNIError) -> None:
    sys.stderr.write(f"istio-iptables: {error.msg}\n")
    if error.details:
        log.debug(error.details)


def _act(options: Options, environ: Mapping[str, str]) -> None:
    config, host = _complete(options)
    if options.dry_run:
        return _print_rules(options, config)
    if not options.skip_rule_apply:
        _program(options, detect.resolve_owners(config), environ)
    if options.run_validation:
        if not host:
            host, _ = detect.host_address(_addresses(), dual_stack=config.dual_stack)
        _validate(options, config, host)
    return None


def _complete(options: Options) -> tuple[CaptureConfig, str]:
    """Find out what the flags leave open; the configuration and the host's address, or ""."""
    config, host = options.config, ""
    if options.cleanup_only:  # nothing of it matters
        return config, host
    if options.detect:
        if not options.uid_given:
            config = config._replace(proxy_uids=(detect.default_uid(options.proxy_user),))
        if not options.gid_given:
            config = config._replace(proxy_gids=config.proxy_uids)
        addresses = _addresses()
        host, ipv6 = detect.host_address(addresses, dual_stack=config.dual_stack)
        config = config._replace(ipv6=ipv6)
        if not ipv6 and detect.host_address(addresses, dual_stack=True)[1]:
            log.warning(
                "IPv6 is not captured: the first address here is IPv4; --dual-stack captures both"
            )
        if config.redirect_dns and not config.capture_all_dns:
            v4, v6 = detect.read_resolv_conf()
            config = config._replace(dns_servers_v4=v4, dns_servers_v6=v6)
    if config.redirect_dns and not config.dns:
        source = detect.RESOLV_CONF if options.detect else "the configuration"
        log.warning("DNS is not captured: %s names no server", source)
    return config, host


def _addresses() -> list[str]:
    from istio_cni.edge import netlink  # not for a dry run with --config

    with netlink.Route() as route:
        return [there.address for there in route.addresses()]


def documents(ruleset: Ruleset) -> dict[str, str]:
    """Return restore documents by the command that loads them, IPv6 only if captured."""
    names = {Family.V4: "iptables-restore --noflush", Family.V6: "ip6tables-restore --noflush"}
    return {names[family]: render(ruleset, family) for family in ruleset.families}


def _print_rules(options: Options, config: CaptureConfig) -> None:
    if options.cleanup_only:
        log.info("nothing to print: a clean-up removes what it finds")
        return
    if config.backend == NFTABLES:
        found = _native_documents(options, config)
        commands = "".join(found.values())
    elif options.output != TEXT:
        raise InvalidParameter(
            f"--output={options.output}: only the back end nftables has it; add --backend=nftables"
        )
    else:
        from istio_cni.capture.iptables import prepare

        found = documents(prepare(config))
        saves = [f"{name.partition('-')[0]}-save\n" for name in found]
        commands = "".join(("iptables-save\nip6tables-save\n", *found.values(), *saves))
    _print("".join(f"# {title}\n{text}" for title, text in found.items()))
    if options.transcript:
        from istio_cni.edge import files  # asked for by a variable

        files.write_whole(options.transcript, commands.encode())
        log.info("commands written to %s", options.transcript)


def _native_documents(options: Options, config: CaptureConfig) -> dict[str, str]:
    """Return the rules for the nftables back end, in the form asked for, by its header."""
    from istio_cni.capture.native import compile_rules
    from istio_cni.rules import nfdump, nftables

    ruleset = generate(config)
    if options.output == TEXT:
        for text in nftables.additions(ruleset):
            log.info("programmed, too, but not part of the reference's text: %s", text)
        return {"nft -f -": nftables.render(nftables.reference(ruleset))}
    wanted = compile_rules(config)
    if options.output == COMPLETE:
        return {"nft -f -": nftables.render_complete(wanted.tables, wanted.comment)}
    size = sum(len(message.body) for message in wanted.fresh)
    title = (
        f"nf_tables netlink: one batch, {len(wanted.fresh)} messages, {size} bytes of attributes"
    )
    return {title: nfdump.describe(wanted.fresh)}


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):  # what is left in the buffer would fail once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise IOFailure(f"cannot write to standard output: {error.strerror}") from error


def _program(options: Options, config: CaptureConfig, environ: Mapping[str, str]) -> None:
    from istio_cni.capture import apply
    from istio_cni.edge.netfilter import SEARCH_PATH, Netfilter
    from istio_cni.edge.netns import Inside, is_here_foreign, run_inside

    deadline = time.monotonic() + CLI_TIMEOUT_S
    directories = [*environ.get("PATH", "").split(":"), *SEARCH_PATH.split(":")]

    def work(inside: Inside) -> object:
        net = Netfilter(
            deadline=deadline,
            search_path=":".join(dict.fromkeys(directories)),
            lock_file=options.network_namespace if options.cni_mode else "",
            shadow_lock=inside.shadow_lock,
        )
        if options.cleanup_only:
            return apply.clean_up(net, inside.log)._asdict()
        existing = apply.REPLACE if options.reconcile else apply.REFUSE
        if options.force_apply:
            existing = apply.REWRITE
        choice = apply.choose(net, config, foreign=is_here_foreign())
        return apply.program(net, config, inside.log, choice, existing=existing)._asdict()

    try:
        if options.cni_mode:
            report = run_inside(work, None, deadline=deadline + apply.ROLLBACK_S, log=_log)
        else:
            report = work(Inside(_log))
    except IstioCNIError as error:
        if os.geteuid() != 0 and not isinstance(error, InvalidParameter):
            error.msg += "; root is needed"
        raise
    if not isinstance(report, dict):
        raise InternalError(f"no report but {report!r}")
    changed = ", ".join(report["changed"])
    if options.cleanup_only:
        log.info("removed %s", changed) if changed else log.info("nothing to remove")
        return
    changed = changed or "nothing: all is in place"
    variants = "".join(f", {name}: {variant}" for name, variant in report["variants"].items())
    log.info(
        "changed %s (back end %s: %s%s)", changed, report["backend"], report["reason"], variants
    )


def _log(level: str, message: str) -> None:
    log.log(_LEVELS[level], message)


def _validate(options: Options, config: CaptureConfig, host: str) -> None:
    from istio_cni.capture.validation import validate

    uid = os.geteuid()
    if not detect.includes_uid(config.proxy_uids, uid):
        uids = ", ".join(config.proxy_uids)
        log.warning(
            "validation runs as uid %d, but only traffic of uid %s is redirected", uid, uids
        )
    validate(
        ":" in host,
        config.outbound_port,
        config.inbound_port,
        options.probe_port,
        options.probe_timeout_s,
        log.info,
    )
    log.info("validation passed: connections are captured")


def _configure_logging(options: Options) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JSONLines() if options.log_json else logging.Formatter("%(levelname)s: %(message)s")
    )
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(_LEVELS[options.log_level])


class _JSONLines(logging.Formatter):
    """One JSON object a line, with the fields of the plugin's log."""

    def format(self, record: logging.LogRecord) -> str:
        import json

        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs * 1000):06d}Z",
            "level": {"WARNING": "warn", "CRITICAL": "fatal"}.get(
                record.levelname, record.levelname.lower()
            ),
            "scope": record.name,
            "msg": record.getMessage(),
        }
        return json.dumps(line)


if __name__ == "__main__":
    sys.exit(main())
