"""What the DaemonSet puts on a node, what its accounts may do, and how it stays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster
from e2e.cluster.addresses import API_SERVICE
from e2e.cluster.configs import CONFLIST
from e2e.install import KUBECONFIG, NAMESPACE, Mesh
from e2e.nodes import on_every_node
from istio_cni.constants import VERSION

BIN_DIR = "/opt/cni/bin"
ISSUER = {  # what every ServiceAccount may read of who signs its tokens
    "[/.well-known/openid-configuration/] [] [get]",
    "[/.well-known/openid-configuration] [] [get]",
    "[/openid/v1/jwks/] [] [get]",
    "[/openid/v1/jwks] [] [get]",
}


def rights(cluster: Cluster, account: str, namespace: str) -> set[str]:
    """Return what an account may do beyond what everybody may, as kubectl lists it.

    Resource, URLs, names of objects, verbs.
    """
    user = f"system:serviceaccount:{NAMESPACE}:{account}"
    groups = (f"system:serviceaccounts:{NAMESPACE}", "system:serviceaccounts")
    everyone = _listed(cluster, namespace, "nobody")
    return _listed(cluster, namespace, user, *groups) - everyone


def _listed(cluster: Cluster, namespace: str, user: str, *groups: str) -> set[str]:
    who = [f"--as={user}", "--as-group=system:authenticated"]
    who += [f"--as-group={group}" for group in groups]
    lines = cluster.kubectl("auth", "can-i", "--list", "-n", namespace, *who).splitlines()
    return {" ".join(line.split()) for line in lines}


def test_the_accounts_may_do_what_they_must(cluster: Cluster, mesh: Mesh) -> None:
    """The agent follows pods and mints tokens of one account; that one reads pods."""
    tokens = "serviceaccounts/token [] [istio-cni-plugin] [create]"
    follow = "pods [] [] [list watch]"
    assert rights(cluster, "istio-cni", NAMESPACE) - ISSUER == {tokens, follow}
    assert rights(cluster, "istio-cni", "default") - ISSUER == {follow}
    for namespace in ("default", NAMESPACE):
        assert rights(cluster, "istio-cni-plugin", namespace) - ISSUER == {"pods [] [] [get]"}


def test_the_agent_has_no_right_that_it_does_not_need(cluster: Cluster, mesh: Mesh) -> None:
    """It may enter pods' namespaces and write where others own the directory."""
    (pid, *_) = cluster.node.succeed("pgrep", "-f", "^install-cni").split()
    status = cluster.node.succeed("grep", "CapBnd", f"/proc/{pid}/status")
    chown, dac_override, fowner = 0, 1, 3  # linux/capability.h
    net_admin, net_raw, sys_chroot, sys_ptrace, sys_admin = 12, 13, 18, 19, 21
    files, namespaces = (chown, dac_override, fowner), (sys_chroot, sys_ptrace, sys_admin)
    wanted = {*files, *namespaces, net_admin, net_raw}
    assert int(status.split()[1], 16) == sum(1 << number for number in wanted)


@on_every_node
def test_the_node_has_the_plugin(cluster: Cluster, mesh: Mesh) -> None:
    """The launcher, a bundle and the agent behind links, one entry at the end."""
    links = cluster.node.succeed(
        "readlink", f"{BIN_DIR}/istio-cni.d/agent.sock", f"{BIN_DIR}/istio-cni.d/current"
    )
    socket, current = links.split()
    assert socket == "/var/run/istio-cni/agent/agent.sock"
    assert re.fullmatch(rf"{re.escape(VERSION)}-[0-9a-f]{{8}}", current)
    said = cluster.node.succeed(f"{BIN_DIR}/istio-cni", "--version")
    assert said == f"istio-cni {VERSION}\n"
    assert mesh.chain() == [*cluster.network, "istio-cni"]


def test_the_kubeconfig_is_the_plugins_alone(cluster: Cluster, mesh: Mesh) -> None:
    """It is root's, names the API server's service and holds a token of the other account."""
    path = cluster.node.path(KUBECONFIG)
    status = os.stat(path)
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, 0)
    document = json.loads(path.read_text())
    assert document["clusters"][0]["cluster"]["server"] == f"https://{API_SERVICE}:443"
    token = document["users"][0]["user"]["token"]
    who = cluster.kubectl("--token", token, "auth", "whoami", "-ojson", "--kubeconfig=/dev/null",
                          f"--server={cluster.api_url}", "--insecure-skip-tls-verify")  # fmt: skip
    name = json.loads(who)["status"]["userInfo"]["username"]
    assert name == f"system:serviceaccount:{NAMESPACE}:istio-cni-plugin"
    assert token not in mesh.log()


@pytest.fixture
def conflist(cluster: Cluster) -> Iterator[dict[str, object]]:
    """Read the conflist as it is; it is put back afterwards."""
    path = cluster.node.path(CONFLIST)
    text = path.read_text()
    yield json.loads(text)
    path.write_text(text)


def test_an_entry_that_somebody_takes_out_comes_back(
    cluster: Cluster, mesh: Mesh, conflist: dict[str, object]
) -> None:
    """Within three seconds, and nothing else in the file changes."""
    plugins = conflist["plugins"]
    assert isinstance(plugins, list)
    path = cluster.node.path(CONFLIST)
    path.write_text(json.dumps({**conflist, "plugins": plugins[:-1], "ours": 1.50}))
    cluster.wait(lambda: "istio-cni" in mesh.chain(), what="the entry is back", timeout_s=3)
    assert json.loads(path.read_text()) == {**conflist, "ours": 1.5}


def test_a_killed_agent_comes_back_to_what_it_left(cluster: Cluster, mesh: Mesh) -> None:
    """The plugin stays while it is away, and its next start changes nothing."""
    before = cluster.node.path(CONFLIST).read_text()
    pids = cluster.node.succeed("pgrep", "-f", "^install-cni").split()
    cluster.node.succeed("kill", "-9", *pids)
    assert cluster.node.path(CONFLIST).read_text() == before
    cluster.wait(
        lambda: cluster.node.run("pgrep", "-f", "^install-cni").stdout.split() not in ([], pids),
        what="the agent is back",
    )
    mesh.wait_ready()
    assert cluster.node.path(CONFLIST).read_text() == before
