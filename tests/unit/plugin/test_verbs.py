"""The verbs as far as no kernel is needed: decisions, refusals, records, and what is logged."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from istio_cni.cni.request import Request
from istio_cni.errors import (
    InvalidNetconf,
    InvalidNetns,
    InvalidParameter,
    IOFailure,
    IstioCNIError,
    KubeconfigUnusable,
    PluginNotAvailable,
    PodLookupFailed,
    UnknownContainer,
)
from istio_cni.plugin.attachments import Attachment, Attachments
from istio_cni.plugin.host import Host as PluginHost
from istio_cni.plugin.log import Log
from istio_cni.plugin.verbs import Verbs

JSON = dict[str, object]
STATUS = "sidecar.istio.io/status"
RESULT: JSON = {"cniVersion": "1.1.0", "ips": [{"address": "10.1.0.5/24"}], "x": 1}


class Host:
    """Hosts the verbs for one call at a time, with pods from a directory of manifests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.pods = directory / "pods"
        self.pods.mkdir()
        self.log: list[JSON] = []

    def add_pod(
        self, annotations: JSON | None = None, *, injected: bool = True, **spec: object
    ) -> None:
        """Let shop/web exist; by default it has a sidecar."""
        notes = {**({STATUS: "{}"} if injected else {}), **(annotations or {})}
        metadata = {"namespace": "shop", "name": "web", "uid": "u1", "annotations": notes}
        spec.setdefault("containers", [{"name": "app"}, {"name": "istio-proxy"}])
        document = {"kind": "Pod", "metadata": metadata, "spec": spec}
        (self.pods / "web.json").write_text(json.dumps(document))

    def call(
        self,
        verb: str,
        netns: str = "/run/netns/none",
        namespace: str = "shop",
        prev_result: object = None,
        override: bool = False,
        config: JSON | None = None,
        **keys: object,
    ) -> JSON | None:
        """Call a verb for shop/web and keep what it logs."""
        stream = io.StringIO()
        base: JSON = {
            "cni_agent_run_dir": str(self.run_dir),
            "pod_source": f"manifests:{self.pods}",
            "exclude_namespaces": ["kube-system"],
        }
        request = Request(
            verb,
            container_id="c1",
            netns=netns,
            ifname="eth0",
            name="k8s",
            args={"K8S_POD_NAMESPACE": namespace, "K8S_POD_NAME": "web", "K8S_POD_UID": "u1"},
            config={**base, **keys, **(config or {})},
            prev_result=prev_result,
        )
        try:
            return Verbs(PluginHost(Log(stream), netns_override=override)).table()[verb](request)
        finally:
            self.log = [json.loads(line) for line in stream.getvalue().splitlines()]

    def logged(self, text: str, level: str) -> bool:
        """Tell whether the last call logged a text at a level."""
        return any(text in str(line["msg"]) and line["level"] == level for line in self.log)

    @property
    def records(self) -> Attachments:
        """The records in the run dir."""
        return Attachments(str(self.run_dir), lambda *_: None)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Make a host without any pod."""
    return Host(tmp_path)


# -- ADD -------------------------------------------------------------------------------------------


def test_add_hands_the_result_on_for_a_pod_that_is_left_alone(host: Host) -> None:
    """And logs why, with the call's identity."""
    assert host.call("ADD", namespace="kube-system", prev_result=RESULT) == RESULT
    (line,) = host.log
    assert line["msg"] == 'not captured: namespace "kube-system" is excluded'
    assert (line["level"], line["verb"], line["container_id"]) == ("info", "ADD", "c1")
    assert (line["ifname"], line["netns"]) == ("eth0", "/run/netns/none")
    assert line["pod"] == "kube-system/web"


def test_add_logs_the_inputs_of_a_decision_at_debug(host: Host) -> None:
    """Names, not values: an annotation may hold anything."""
    host.add_pod({"secret.example.com/token": "s3cr3t"}, containers=[{"name": "app"}])
    host.call("ADD", plugin_log_level="debug")
    line = next(line for line in host.log if line["level"] == "debug")
    assert (line["uid"], line["containers"]) == ('"u1"', '"app"')
    assert "secret.example.com/token" in str(line["annotations"])
    assert "s3cr3t" not in json.dumps(host.log)


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ({"pod_source": "kubernetes"}, KubeconfigUnusable, "istio-cni-kubeconfig"),
        ({}, PodLookupFailed, '"shop/web"'),
        ({"pod_source": "manifests:/nonexistent"}, IOFailure, "/nonexistent"),
        ({"backend": "ipvs"}, InvalidNetconf, "backend"),
    ],
)
def test_add_fails_if_it_cannot_know_the_pod(
    host: Host, keys: JSON, error: type[IstioCNIError], text: str
) -> None:
    """Typed by whose fault it is."""
    with pytest.raises(error, match=text):
        host.call("ADD", config=keys)


def test_add_names_the_pod_whose_annotation_it_refuses(host: Host) -> None:
    """Before the namespace is opened."""
    host.add_pod({"traffic.sidecar.istio.io/includeInboundPorts": "http"})
    with pytest.raises(InvalidParameter) as caught:
        host.call("ADD")
    assert caught.value.msg.startswith('pod "shop/web": annotation traffic.sidecar.istio.io/inc')


def test_add_names_the_pod_whose_namespace_is_missing(host: Host) -> None:
    """Only a pod that is to be captured needs one."""
    host.add_pod()
    with pytest.raises(InvalidNetns) as caught:
        host.call("ADD")
    assert caught.value.msg.startswith('pod "shop/web": cannot open network namespace')
    host.add_pod(hostNetwork=True)
    assert host.call("ADD") == {"cniVersion": "1.1.0"}


@pytest.mark.parametrize("namespace", ["shop", "kube-system"])
def test_add_refuses_the_host_s_namespace_before_anything_else(host: Host, namespace: str) -> None:
    """Whosever pod it is."""
    with pytest.raises(InvalidNetns, match="host's network namespace"):
        host.call("ADD", "/proc/self/ns/net", namespace)


def test_add_refuses_a_result_that_nobody_could_read_first(host: Host) -> None:
    """Also of a pod that is left alone."""
    with pytest.raises(IstioCNIError, match=r"prevResult.ips\[0\].address"):
        host.call("ADD", namespace="kube-system", prev_result={"ips": [{}]})


def test_ambient_mode_is_refused_for_pods_without_sidecar(host: Host) -> None:
    """It is not part of this version, and such a pod may be ambient."""
    host.add_pod(injected=False, containers=[{"name": "app"}])
    with pytest.raises(InvalidNetconf, match=r'pod "shop/web" .*ambient_enabled: true'):
        host.call("ADD", ambient_enabled=True)
    assert host.call("ADD", namespace="kube-system", ambient_enabled=True) is not None


# -- CHECK -----------------------------------------------------------------------------------------


def test_check_of_an_excluded_namespace_needs_nothing(host: Host) -> None:
    """Neither namespace nor pod; the reason is there for who asks for it."""
    assert host.call("CHECK", namespace="kube-system") is None
    assert host.log == []
    host.call("CHECK", namespace="kube-system", plugin_log_level="debug")
    assert host.logged("nothing to prove", "debug")


def test_check_without_namespace_tells_the_runtime_that_the_container_is_gone(
    host: Host, tmp_path: Path
) -> None:
    """Code 3: never there, below a file, or a file that is no namespace any more."""
    file = tmp_path / "file"
    file.touch()
    for path in (str(tmp_path / "none"), str(file / "none"), str(file)):
        with pytest.raises(UnknownContainer):
            host.call("CHECK", path)


def test_check_that_may_not_look_does_not_say_that_the_container_is_gone(
    host: Host, tmp_path: Path
) -> None:
    """A loop of links is somebody's mistake, not an end."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(InvalidNetns):
        host.call("CHECK", str(loop))


def test_check_with_a_mistaken_configuration_is_not_the_pod_s_fault(host: Host) -> None:
    """The namespace counts, then what can be known."""
    with pytest.raises(UnknownContainer):
        host.call("CHECK", backend=5)
    assert host.logged("backend", "warn")


# -- DEL -------------------------------------------------------------------------------------------


def record(**fields: object) -> Attachment:
    """Make a record of the call's attachment."""
    defaults: JSON = {"container_id": "c1", "ifname": "eth0", "network": "k8s", "inode": (1, 2)}
    return Attachment(**(defaults | fields))  # type: ignore[arg-type]


def test_del_of_an_unknown_attachment_does_nothing(host: Host) -> None:
    """It does not even make the directory."""
    assert host.call("DEL") is None
    assert host.log == []
    assert not host.run_dir.exists()


@pytest.mark.parametrize("netns", ["", "/run/netns/none"])
def test_del_forgets_what_is_gone(host: Host, netns: str) -> None:
    """Without a namespace there is nothing to undo, and nothing to complain of."""
    host.records.write(record())
    assert host.call("DEL", netns) is None
    assert [line for line in host.log if line["level"] != "info"] == []
    assert os.listdir(host.records.directory) == []


def test_del_cleans_up_after_a_killed_add(host: Host) -> None:
    """Half a record and a lock are nobody else's."""
    directory = Path(host.records.directory)
    directory.mkdir(parents=True)
    for name in (".c1-eth0.4711", ".c1.lock", ".c2.lock"):
        (directory / name).touch()
    host.call("DEL")
    assert os.listdir(directory) == [".c2.lock"]


def test_del_finds_its_record_also_with_a_mistaken_configuration(host: Host) -> None:
    """What cannot be used is logged and has its default."""
    host.records.write(record())
    host.call("DEL", "", backend=5, exclude_namespaces="all", pod_source=[])
    assert os.listdir(host.records.directory) == []
    assert host.logged("backend: 5 is not allowed", "warn")


# -- GC --------------------------------------------------------------------------------------------

VALID = "cni.dev/valid-attachments"


@pytest.mark.parametrize(
    ("valid", "left"),
    [
        (None, ["c1-eth0", "c1-net1", "c2-eth0", "c3-eth0"]),
        ([], ["c3-eth0"]),
        ([{"containerID": "c1", "ifname": "eth0"}], ["c1-eth0", "c3-eth0"]),
        ([{"containerID": "c3", "ifname": "eth0"}], ["c3-eth0"]),
    ],
)
def test_gc_drops_stale_records_of_its_network(host: Host, valid: object, left: list[str]) -> None:
    """No list is not an empty list."""
    for container_id, ifname in (("c1", "eth0"), ("c1", "net1"), ("c2", "eth0")):
        host.records.write(record(container_id=container_id, ifname=ifname))
    host.records.write(record(container_id="c3", network="another"))
    host.call("GC", config={VALID: valid})
    assert sorted(os.listdir(host.records.directory)) == left
    assert len(host.log) == 4 - len(left)


def test_gc_hands_rules_on_to_an_interface_that_stays(host: Host) -> None:
    """A stale eth0 of a pod whose net1 is attached."""
    host.records.write(record())
    host.records.write(record(ifname="net1", made_rules=False))
    host.call("GC", config={VALID: [{"containerID": "c1", "ifname": "net1"}]})
    heir = host.records.read("c1", "net1")
    assert heir is not None
    assert heir.made_rules


def test_gc_goes_on_after_what_it_cannot_do(host: Host) -> None:
    """A record that another call holds stays for the next time."""
    host.records.write(record())
    host.records.write(record(container_id="c2"))
    with host.records.lock("c1", 0):
        host.call("GC", config={VALID: []})
    assert os.listdir(host.records.directory) == ["c1-eth0"]
    assert host.logged("another call holds", "error")


# -- STATUS ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"pod_source": "kubernetes"}, "istio-cni-kubeconfig"),
        ({"pod_source": "manifests:/nonexistent"}, "/nonexistent"),
        ({"native_nftables": "on"}, "native_nftables"),
        ({"ambient_enabled": True}, "ambient_enabled"),
        ({"backend": "ipvs"}, "backend"),
        ({"outbound_owner_groups": "wheel"}, "outbound_owner_groups"),
        ({"outbound_owner_groups": ",".join(map(str, range(50)))}, "50 included owner groups"),
        ({"outbound_owner_groups_exclude": "-"}, "outbound_owner_groups_exclude"),
        ({"host_ipv4_loopback_cidr": "10.0.0.0/8"}, "host_ipv4_loopback_cidr"),
    ],
)
def test_status_fails_only_where_that_was_asked_for(host: Host, keys: JSON, text: str) -> None:
    """Otherwise the node would lose its network, and with it what could mend it."""
    assert host.call("STATUS", config=keys) is None
    assert host.logged(text, "warn")
    with pytest.raises(PluginNotAvailable, match=text):
        host.call("STATUS", config={"status_strict": True, **keys})


def test_status_is_quiet_when_all_is_well(host: Host) -> None:
    """The directory of manifests is there."""
    assert host.call("STATUS", status_strict=True) is None
    assert host.log == []
