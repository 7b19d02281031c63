"""What the cache costs: the requests of a large cluster, and the memory of a full node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_watch import NODE, FakeWatchServer, pod, until
from istio_cni.agent.pods import PodCache
from istio_cni.edge.kube.watch import NodePods

CLUSTER_PODS, NODE_PODS, FULL_NODE_PODS = 20_000, 40, 110
RSS_MAX_MIB = 110
CHILD = """
import json, os, sys
import istio_cni.agent.main, istio_cni.agent.node  # all that the agent loads
import kubernetes.client
kubernetes.client.CoreV1Api  # what asking for tokens loads
from istio_cni.agent.pods import PodCache
from istio_cni.edge.kube.watch import NodePods

def rss():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {name: int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}

account, node = sys.argv[1:]
report = {"before": rss()}
cache = PodCache(NodePods(account, os.environ, node))
cache.start()
for line in sys.stdin:  # one: it is time to look
    print(json.dumps(report | {"after": rss(), "size": cache.size, "age_s": cache.age_s}))
    sys.stdout.flush()
cache.stop()
"""


def realistic(number: int, size: int) -> dict[str, object]:
    """Make an injected pod as the API server has it, of about `size` bytes."""
    made = pod("shop", f"web-7d9c5b8f6-{number:05}", f"0f9e8d7c-{number:08}")
    about, spec = made["metadata"], made["spec"]
    assert isinstance(about, dict)
    assert isinstance(spec, dict)
    about["labels"] = {"app": "web", "pod-template-hash": "7d9c5b8f6", "version": f"v{number % 3}"}
    about["annotations"] = {
        "sidecar.istio.io/status": json.dumps({"volumes": ["istio-envoy"] * 6, "revision": "x"}),
        "traffic.sidecar.istio.io/excludeOutboundPorts": "3306,6379",
        "kubectl.kubernetes.io/last-applied-configuration": "x" * 1500,
        "kubernetes.io/config.source": "api",
    }
    env = [{"name": f"ISTIO_META_{n}", "value": f"value {n} of every proxy"} for n in range(35)]
    env.append({"name": "POD_NAME", "value": f"web-{number}"})
    spec["initContainers"] = [{"name": "istio-validation", "image": "proxyv2", "args": ["x"] * 20}]
    spec["containers"] += [
        {"name": "istio-proxy", "args": ["proxy", "sidecar"] + ["x"] * 12, "env": env}
    ]
    fields: dict[str, object] = {}
    about["managedFields"] = [{"manager": "kubelet", "fieldsV1": fields}]
    while len(json.dumps(made)) < size:
        for n in range(20):
            fields[f"f:field-{number}-{len(fields)}"] = {f"k:{n}": {"f:name": {}, ".": {}}}
    return made


def test_a_node_asks_for_its_own_pods_only(tmp_path: Path) -> None:
    """40 of 20,000 are sent, once."""
    with FakeWatchServer() as server:
        every = CLUSTER_PODS // NODE_PODS
        for number in range(CLUSTER_PODS):
            node = NODE if number % every == 0 else f"other-{number % every}"
            server.pods["shop", f"p{number}"] = pod("shop", f"p{number}", f"u{number}", node=node)
        env = server.write_account(tmp_path)
        cache = PodCache(NodePods(str(tmp_path), env, NODE))
        cache.start()
        try:
            until(lambda: not cache.trouble)
            assert cache.size == NODE_PODS
            assert cache.find("shop", "p500", "u500") is not None
            assert cache.find("shop", "p501", "u501") is None
        finally:
            cache.stop()
        assert server.objects_sent == NODE_PODS
        selectors = [query["fieldSelector"] for query in server.asked()]
        assert selectors == [f"spec.nodeName={NODE}"] * 2


def test_a_full_node_fits_into_memory(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The agent with everything that it loads, and 110 pods that were replaced several times."""
    with FakeWatchServer() as server:
        sizes = [10_000 + 200 * number for number in range(FULL_NODE_PODS)]  # to 32 kB
        for number, size in enumerate(sizes):
            server.put(realistic(number, size))
        env = server.write_account(tmp_path)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), NODE],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            until(lambda: server.streams or child.poll() is not None, 20)
            for number, size in enumerate(sizes):
                server.put(realistic(number, size))
            server.compact()
            server.stop()  # the child lists them a second time
            server.start()
            until(lambda: len(server.streams) > 1 or child.poll() is not None, 20)
            shown, _ = child.communicate("\n", timeout=20)
        finally:
            child.kill()
            child.wait()
    report = json.loads(shown)
    record_property("rss", report)
    sys.stdout.write(f"{report}\n")
    assert report["size"] == FULL_NODE_PODS
    assert report["after"]["VmHWM"] <= RSS_MAX_MIB


@pytest.mark.parametrize("size", [10_000, 30_000])
def test_pods_of_the_test_are_realistic(size: int) -> None:
    """They have the size that they should have."""
    assert size <= len(json.dumps(realistic(7, size))) < 1.2 * size
