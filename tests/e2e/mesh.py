"""Pods as an injector leaves them, with a real Envoy as their proxy, and what its log says.

The proxy listens where Istio's does: outbound on 15001, inbound on 15006, its own health on 15021,
DNS on 15053. Each connection ends as one line of its access log: which listener took it, where it
was going, and who sent it. `original` is what the kernel's NAT table remembers, so a line proves
that the connection was captured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

JSON = dict[str, object]
BUSYBOX = "e2e/busybox:1"
PROXY = "e2e/proxy:1"
STATUS = "sidecar.istio.io/status"
TRAFFIC = "traffic.sidecar.istio.io/"
MODE = "sidecar.istio.io/interceptionMode"
APP_PORT = 8080
METRICS_PORT = 9090  # left out of capture by the annotations of `annotations()`
HEALTH_PORT = 15021
DNS_NAME, DNS_ANSWER = "inside.mesh.example", "192.0.2.77"  # only the proxy knows it
FORMAT = (
    "captured=%s original=%%DOWNSTREAM_LOCAL_ADDRESS%% client=%%DOWNSTREAM_REMOTE_ADDRESS%% "
    "upstream=%%UPSTREAM_HOST%%\n"
)


class Captured(NamedTuple):
    """A connection in the proxy's log: "outbound" or "inbound", and its two ends."""

    direction: str
    original: str
    client: str


def captured(log: str) -> list[Captured]:
    """Read the proxy's access log; other lines are its own affairs."""
    found = re.findall(r"^captured=(\w+) original=(\S+) client=(\S+) ", log, re.MULTILINE)
    return [Captured(*fields) for fields in found]


def host_port(address: str, port: int) -> str:
    """Write an address as URLs and Envoy do: `10.0.0.1:80`, `[fd00::1]:80`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# -- Envoy ---------------------------------------------------------------------------------------


def envoy_config(*, tproxy: bool = False) -> str:
    """Return the proxy's bootstrap configuration, as JSON."""
    listeners = [
        _listener("outbound", 15001, [_filter("listener.original_dst", "OriginalDst")]),
        _listener("inbound", 15006, _inbound_filters(tproxy), transparent=tproxy),
        _health_listener(),
        _dns_listener(),
    ]
    outbound: JSON = {
        "name": "outbound",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "5s",
    }
    # what the proxy sends to its own pod comes from these addresses, which the rules let pass
    inbound: JSON = {**outbound, "name": "inbound"}
    if not tproxy:
        inbound["upstream_bind_config"] = {
            "source_address": {"address": "127.0.0.6", "port_value": 0},
            "extra_source_addresses": [{"address": {"address": "::6", "port_value": 0}}],
        }
    return json.dumps(
        {"static_resources": {"listeners": listeners, "clusters": [outbound, inbound]}}
    )


def _inbound_filters(tproxy: bool) -> list[JSON]:
    original_dst = _filter("listener.original_dst", "OriginalDst")
    if not tproxy:
        return [original_dst]
    return [original_dst, _filter("listener.original_src", "OriginalSrc", mark=1337)]


def _filter(name: str, kind: str, **fields: object) -> JSON:
    return _extension(f"filters.{name}", f"filters.{name}.v3.{kind}", **fields)


def _extension(name: str, kind: str, **fields: object) -> JSON:
    """Configure an extension by its name and the type of its configuration."""
    url = f"type.googleapis.com/envoy.extensions.{kind}"
    return {"name": f"envoy.{name}", "typed_config": {"@type": url, **fields}}


def _address(host: str, port: int, protocol: str = "TCP") -> JSON:
    return {"socket_address": {"address": host, "port_value": port, "protocol": protocol}}


def _listener(name: str, port: int, filters: list[JSON], *, transparent: bool = False) -> JSON:
    log = _extension(
        "access_loggers.stdout",
        "access_loggers.stream.v3.StdoutAccessLog",
        log_format={"text_format_source": {"inline_string": FORMAT % name}},
    )
    proxy = _filter(
        "network.tcp_proxy", "TcpProxy", stat_prefix=name, cluster=name, access_log=[log]
    )
    return {
        "name": name,
        "address": _address("0.0.0.0", port),
        "additional_addresses": [{"address": _address("::", port)}],
        "listener_filters": filters,
        "filter_chains": [{"filters": [proxy]}],
        **({"transparent": True} if transparent else {}),
    }


def _health_listener() -> JSON:
    """Answer 200 to every request on a port that is never captured inbound."""
    route = {"match": {"prefix": "/"}, "direct_response": {"status": 200}}
    manager = _filter(
        "network.http_connection_manager",
        "HttpConnectionManager",
        stat_prefix="health",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=[_filter("http.router", "Router")],
    )
    return {
        "name": "health",
        "address": _address("0.0.0.0", HEALTH_PORT),
        "additional_addresses": [{"address": _address("::", HEALTH_PORT)}],
        "filter_chains": [{"filters": [manager]}],
    }


def _dns_listener() -> JSON:
    """Answer DNS queries for one name."""
    domain = {"name": DNS_NAME, "endpoint": {"address_list": {"address": [DNS_ANSWER]}}}
    dns = _filter(
        "udp.dns_filter",
        "DnsFilterConfig",
        stat_prefix="dns",
        server_config={"inline_dns_table": {"virtual_domains": [domain]}},
    )
    return {
        "name": "dns",
        "address": _address("127.0.0.1", 15053, "UDP"),
        "listener_filters": [dns],
    }


# -- pods ----------------------------------------------------------------------------------------


def annotations(**traffic: str) -> dict[str, str]:
    """Return the annotations of a captured pod; those of `traffic` are under our prefix."""
    status = json.dumps({"initContainers": ["istio-validation"], "containers": ["istio-proxy"]})
    return {
        STATUS: status,
        TRAFFIC + "excludeInboundPorts": str(METRICS_PORT),
        **{TRAFFIC + name: value for name, value in traffic.items()},
    }


def app_container() -> JSON:
    """Return an application that serves HTTP on two ports, with probes of both kinds."""
    serve = "hostname > /srv/index.html; httpd -p {0} -h /srv; exec httpd -f -v -p {1} -h /srv"
    return {
        "name": "app",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", serve.format(METRICS_PORT, APP_PORT)],
        "readinessProbe": {"httpGet": {"path": "/", "port": APP_PORT}, "periodSeconds": 1},
        "livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 1},
        "volumeMounts": [{"name": "srv", "mountPath": "/srv"}],
    }


def client_container() -> JSON:
    """Return a container in which tests run commands."""
    return {"name": "client", "image": BUSYBOX, "imagePullPolicy": "Never"}


def proxy_container(env: Mapping[str, str] | None = None, *, tproxy: bool = False) -> JSON:
    """Return the proxy as the injector sets it; with TPROXY it is root and may bind any address."""
    security: JSON = {
        "runAsUser": 0 if tproxy else 1337,
        "runAsGroup": 1337,
        "runAsNonRoot": not tproxy,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **({"add": ["NET_ADMIN"]} if tproxy else {})},
    }
    command = [
        *("envoy", "--log-level", "warning", "--concurrency", "1", "--disable-hot-restart"),
        *("--file-flush-interval-msec", "50", "--config-yaml", envoy_config(tproxy=tproxy)),
    ]
    return {
        "name": "istio-proxy",
        "image": PROXY,
        "imagePullPolicy": "Never",
        "command": command,
        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
        "readinessProbe": {"httpGet": {"path": "/", "port": HEALTH_PORT}, "periodSeconds": 1},
        "securityContext": security,
    }


def pod(
    name: str,
    containers: list[JSON],
    *,
    namespace: str = "default",
    marks: Mapping[str, str] | None = None,
    init: list[JSON] | None = None,
    **spec: object,
) -> JSON:
    """Return a pod that ends at once when it is deleted; `marks` are its annotations."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app": name},
            "annotations": dict(marks or {}),
        },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "volumes": [{"name": "srv", "emptyDir": {}}],
            **({"initContainers": init} if init else {}),
            "containers": containers,
            **spec,
        },
    }


def plain_pod(name: str, **fields: object) -> JSON:
    """Return a pod outside the mesh: an application and a client."""
    return pod(name, [app_container(), client_container()], **fields)  # type: ignore[arg-type]


def mesh_pod(
    name: str,
    *,
    env: Mapping[str, str] | None = None,
    traffic: Mapping[str, str] | None = None,
    tproxy: bool = False,
    init: list[JSON] | None = None,
    **fields: object,
) -> JSON:
    """Return a pod of the mesh: an application, a client and the proxy, dual stack."""
    marks = annotations(**(traffic or {}))
    if tproxy:
        marks[MODE] = "TPROXY"
    proxy = proxy_container({"ISTIO_DUAL_STACK": "true", **(env or {})}, tproxy=tproxy)
    containers = [app_container(), proxy, client_container()]
    return pod(name, containers, marks=marks, init=init, **fields)  # type: ignore[arg-type]


def validation_container() -> JSON:
    """Return what the injector adds to prove the capture: exit status 126 where there is none."""
    return _rules_container(
        "istio-validation",
        ["--run-validation", "--skip-rule-apply"],
        {"runAsUser": 1337, "runAsGroup": 1337, "runAsNonRoot": True},
    )


def init_container() -> JSON:
    """Return what the injector adds where there is no plugin: it programs the rules itself."""
    return _rules_container(
        "istio-init",
        ["--dual-stack"],
        {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False},
        ["NET_ADMIN", "NET_RAW"],
    )


def _rules_container(
    name: str, args: list[str], user: JSON, capabilities: list[str] | None = None
) -> JSON:
    """Run istio-iptables with the injector's arguments and some more."""
    return {
        "name": name,
        "image": PROXY,
        "imagePullPolicy": "Never",
        "command": ["istio-iptables"],
        "args": [
            *("-p", "15001", "-z", "15006", "-u", "1337", "-m", "REDIRECT", "-i", "*", "-x", ""),
            *(
                "-b",
                "*",
                "-d",
                f"15090,15021,15020,{METRICS_PORT}",
                "--log_output_level=default:info",
            ),
            *args,
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": name == "istio-validation",
            "capabilities": {"drop": ["ALL"], **({"add": capabilities} if capabilities else {})},
            **user,
        },
    }
