"""The installed plugin as a process: what any CNI runtime may expect of it, whatever the pod."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from istio_cni.constants import SUPPORTED_VERSIONS, VERSION
from netns.plugin import JSON, PATH, PROGRAM, WEB, Answer, Node, environment, run, start, stdin

pytestmark = pytest.mark.netns

NOT_OURS = WEB._replace(namespace="kube-system")
FLAT: JSON = {
    "cniVersion": "0.2.0",
    "ip4": {
        "ip": "10.1.0.5/16",
        "gateway": "10.1.0.1",
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}],
    },
    "ip6": {"ip": "fd00::5/64", "routes": [{"dst": "::/0"}]},
    "dns": {"nameservers": ["10.96.0.10"], "search": ["shop.svc"], "options": ["ndots:5"]},
    "x-other": {"kept": [1, 1.50, None]},
}
CHAINED: JSON = {
    "cniVersion": "0.4.0",
    "interfaces": [
        {"name": "veth0", "mac": "0a:00:00:00:00:01"},
        {"name": "eth0", "mac": "0a:00:00:00:00:02", "sandbox": "/run/netns/x"},
    ],
    "ips": [
        {"version": "4", "address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 0},
        {"version": "6", "address": "fd00::5/64", "interface": 1},
    ],
    "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "::/0"}],
    "dns": {"nameservers": ["10.96.0.10"], "domain": "shop", "options": []},
    "x-other": {"kept": [1, 1.50, None]},
}
CURRENT: JSON = {
    "cniVersion": "1.1.0",
    "interfaces": [{"name": "eth0", "mtu": 1450, "sandbox": "/run/netns/x", "pciID": "0000:00"}],
    "ips": [
        {"address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 0},
        {"address": "fd00::5/64", "interface": 0},
    ],
    "routes": [
        {"dst": "0.0.0.0/0", "gw": "10.1.0.1", "mtu": 1400, "table": 0, "scope": 0},
        {"dst": "::/0", "priority": 10},
    ],
    "dns": {"nameservers": ["10.96.0.10"], "search": ["shop.svc"]},
    "x-other": {"kept": [1, 1.50, None]},
}
RESULTS = {
    "0.1.0": FLAT,
    "0.2.0": FLAT,
    "0.3.0": CHAINED,
    "0.3.1": CHAINED,
    "0.4.0": CHAINED,
    "1.0.0": CURRENT,
    "1.1.0": CURRENT,
}


def bare(**env: str) -> dict[str, str]:
    """Make an environment with nothing in it but what is given."""
    return {"PATH": PATH, **env}


def is_one_document(text: str) -> bool:
    """Tell whether a text is one JSON object and nothing after it, not even a newline."""
    document, end = json.JSONDecoder().raw_decode(text)
    return isinstance(document, dict) and end == len(text)


# -- VERSION, no verb, --version -------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"{}", b"", b'{"cniVersion": "0.3.1"}', b"garbage"])
@pytest.mark.parametrize("others", [{}, {"CNI_NETNS": "dummy", "CNI_CONTAINERID": "/", "X": "1"}])
def test_version_needs_nothing_and_does_nothing(text: bytes, others: dict[str, str]) -> None:
    """Seven versions and exit 0, whatever is on stdin and in other variables."""
    answer = run(bare(CNI_COMMAND="VERSION", **others), text)
    assert answer.status == 0
    assert answer.json == {"cniVersion": "1.1.0", "supportedVersions": list(SUPPORTED_VERSIONS)}
    assert answer.stderr == ""


def test_version_does_not_wait_for_the_end_of_stdin() -> None:
    """A runtime may keep the pipe open while it asks every plugin of a chain."""
    process = subprocess.Popen(
        [PROGRAM],
        env=bare(CNI_COMMAND="VERSION"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert is_one_document(process.stdout.read().decode())
        assert process.wait(10) == 0


def test_without_a_verb_the_plugin_says_what_it_is() -> None:
    """Whoever starts it by hand reads that on stderr; it is no error."""
    answer = run(bare(), b"")
    assert (answer.status, answer.stdout) == (0, "")
    assert f"istio-cni {VERSION}" in answer.stderr
    assert ", ".join(SUPPORTED_VERSIONS) in answer.stderr


def test_the_program_tells_its_version() -> None:
    """As all programs of the product do."""
    assert subprocess.check_output([PROGRAM, "--version"], text=True) == f"istio-cni {VERSION}\n"


# -- the environment and the streams ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "changes", "code"),
    [
        ("UPDATE", {}, 4),
        ("add", {}, 4),
        ("ADD", {"CNI_CONTAINERID": None, "CNI_IFNAME": "", "CNI_NETNS": None}, 4),
        ("ADD", {"CNI_CONTAINERID": "a/b"}, 4),
        ("DEL", {"CNI_IFNAME": "a b"}, 4),
        ("CHECK", {"CNI_IFNAME": "sixteen-letters-"}, 4),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(
    tmp_path: Path, verb: str, changes: dict[str, str | None], code: int
) -> None:
    """One error object on stdout, exit 1, and the same in the log."""
    answer = Node(tmp_path).call(verb, "/run/netns/none", env=changes)
    assert (answer.status, answer.code) == (1, code)
    assert is_one_document(answer.stdout)
    assert answer.log[-1]["msg"] == answer.msg


def test_only_cni_variables_matter(node: Node, pod_netns: str) -> None:
    """A proxy, a useless PATH and the switches of the reference's plugin change nothing."""
    node.add_pod(env=[{"name": "ISTIO_DUAL_STACK", "value": "true"}])
    odd = {
        "HTTPS_PROXY": "http://127.0.0.1:1",
        "https_proxy": "http://127.0.0.1:1",
        "ALL_PROXY": "socks5://127.0.0.1:1",
        "PATH": "/nonexistent:\x01",
        "SSL_CERT_FILE": "/nonexistent",
        "SSL_CERT_DIR": "/nonexistent",
        "DRY_RUN_FILE_PATH": "/nonexistent",
        "ISTIO_OUTBOUND_OWNER_GROUPS": "9999",
        "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR": "127.0.0.0/8",
        "KUBECONFIG": "/nonexistent",
        "KUBERNETES_SERVICE_HOST": "192.0.2.1",
        "LD_LIBRARY_PATH": "/nonexistent",
        "XTABLES_LOCKFILE": "/nonexistent",
        "XTABLES_LIBDIR": "/nonexistent",
        "LC_ALL": "xx_XX.UTF-99",
        "TMPDIR": "/nonexistent",
        "HOME": "/nonexistent",
        "CNI_PATH": "",
        "TRACEPARENT": "00-0-0-00",
    }
    answer = node.call("ADD", pod_netns, env=odd)
    assert (answer.status, answer.stderr.count("\n")) == (0, 1), answer
    record = node.record()
    assert record is not None
    plain = node.call("ADD", pod_netns)
    assert plain.log[0]["changed"] == "nothing: all was in place"
    assert node.record() == record


def closing(number: int, env: dict[str, str], text: bytes, tmp_path: Path) -> Answer:
    """Run the plugin with one of its three streams closed."""
    script = f'exec "$0" {number}{"<" if number == 0 else ">"}&-'
    out, err = tmp_path / "out", tmp_path / "err"
    out.touch()
    err.touch()
    with out.open("w") as stdout, err.open("w") as stderr:
        done = subprocess.run(
            ["sh", "-c", script, str(PROGRAM)],
            env=env,
            input=text,
            stdout=stdout,
            stderr=stderr,
            check=False,
        )
    return Answer(done.returncode, out.read_text(), err.read_text(), 0.0)


def test_a_closed_stdin_is_an_error_of_the_caller(tmp_path: Path) -> None:
    """Code 6, not a fault of ours: there is no configuration."""
    answer = closing(0, environment("ADD", "/run/netns/none"), b"", tmp_path)
    assert (answer.status, answer.code) == (1, 6)


def test_a_closed_stderr_costs_the_log_only(tmp_path: Path) -> None:
    """The answer comes as ever."""
    text = stdin(Node(tmp_path).config())
    env = environment("ADD", "/run/netns/none", NOT_OURS)
    answer = closing(2, env, text, tmp_path)
    assert (answer.status, answer.json, answer.stderr) == (0, {"cniVersion": "1.1.0"}, "")


def test_a_broken_log_pipe_does_not_fail_a_pod(tmp_path: Path) -> None:
    """A runtime that stopped to read stderr still gets exit 0 and the result."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [PROGRAM],
        env=environment("ADD", "/run/netns/none", NOT_OURS),
        input=stdin(Node(tmp_path).config()),
        stdout=subprocess.PIPE,
        stderr=write_end,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"cniVersion": "1.1.0"})


# -- the result ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_add_hands_the_result_on_in_every_version(tmp_path: Path, version: str) -> None:
    """Two addresses, routes, DNS, zeros and keys that we do not know come out as they went in."""
    node = Node(tmp_path)
    before = {**RESULTS[version], "cniVersion": version}
    config = node.config(version, plugin_log_level="debug")
    answer = node.call("ADD", "/run/netns/none", NOT_OURS, config=config, prev_result=before)
    assert answer.status == 0
    assert is_one_document(answer.stdout)
    assert answer.json == before
    assert list(answer.json) == list(before)
    assert "1.5" in answer.stdout


@pytest.mark.parametrize("level", ["debug", "info", "none", "shout"])
@pytest.mark.parametrize("version", ["0.4.0", "1.1.0"])
def test_a_captured_pod_s_result_is_handed_on_as_well(
    node: Node, pod_netns: str, version: str, level: str
) -> None:
    """One document on stdout at any log level; the log has its levels."""
    node.add_pod()
    before = {**RESULTS[version], "cniVersion": version}
    config = node.config(version, plugin_log_level=level)
    answer = node.call("ADD", pod_netns, config=config, prev_result=before)
    assert (answer.status, answer.json) == (0, before)
    assert is_one_document(answer.stdout)
    assert answer.logged("captured", "info") == (level != "none")
    assert answer.logged("looked up", "debug") == (level == "debug")
    assert answer.logged("unknown level", "warn") == (level == "shout")


def test_a_result_of_another_family_is_converted(tmp_path: Path) -> None:
    """What the previous plugin printed is not always what it was asked for."""
    node = Node(tmp_path)
    answer = node.call("ADD", "/run/netns/none", NOT_OURS, prev_result=CHAINED)
    assert answer.status == 0
    assert answer.json["cniVersion"] == "1.1.0"
    assert answer.json["ips"] == [
        {"address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 0},
        {"address": "fd00::5/64", "interface": 1},
    ]
    for key in ("interfaces", "routes", "dns", "x-other"):
        assert answer.json[key] == CHAINED[key]


def test_a_result_that_no_runtime_could_read_fails_before_anything_is_done(
    node: Node, pod_netns: str
) -> None:
    """Code 6; the API server is not even asked."""
    node.add_pod()
    answer = node.call("ADD", pod_netns, prev_result={"cniVersion": "1.1.0", "ips": [{}]})
    assert (answer.status, answer.code) == (1, 6)
    assert node.api.requests == []
    assert node.record() is None


# -- STATUS ----------------------------------------------------------------------------------------


def test_status_never_locks_a_node_out(node: Node) -> None:
    """Exit 0 also without kubeconfig, with a line in the log; 50 only where it was asked for."""
    ready = node.call("STATUS")
    assert (ready.silent, ready.stderr) == (True, "")
    node.kubeconfig.unlink()
    answer = node.call("STATUS")
    assert answer.silent
    assert answer.logged("istio-cni-kubeconfig", "warn")
    strict = node.call("STATUS", config=node.config(status_strict=True))
    assert (strict.status, strict.code) == (1, 50)
    assert "istio-cni-kubeconfig" in strict.msg


def test_status_tells_of_keys_that_no_add_would_take(node: Node) -> None:
    """They are logged; with status_strict they are the answer."""
    answer = node.call("STATUS", config=node.config(backend="ipvs"))
    assert answer.silent
    assert answer.logged("backend", "warn")
    strict = node.call("STATUS", config=node.config(backend="ipvs", status_strict=True))
    assert (strict.code, "backend" in strict.msg) == (50, True)


def test_status_asks_for_the_directory_of_manifests(tmp_path: Path) -> None:
    """Where pods come from files, that is what an ADD needs."""
    node = Node(tmp_path)
    assert node.call("STATUS").stderr == ""
    config = node.config(pod_source=f"manifests:{tmp_path}/none", status_strict=True)
    assert node.call("STATUS", config=config).code == 50


@pytest.mark.parametrize("verb", ["STATUS", "GC"])
def test_later_verbs_need_a_later_version(tmp_path: Path, verb: str) -> None:
    """Code 1 below 1.1.0."""
    node = Node(tmp_path)
    answer = node.call(verb, config=node.config("1.0.0"))
    assert (answer.status, answer.code) == (1, 1)


# -- GC --------------------------------------------------------------------------------------------


@pytest.fixture
def attached(node: Node, pod_netns: str) -> Node:
    """Make a node with records of one container on two networks, and of another container."""
    node.add_pod()
    other = node.config(name="second-network")
    assert node.call("ADD", pod_netns).status == 0
    assert node.call("ADD", pod_netns, WEB._replace(ifname="net1"), config=other).status == 0
    assert node.call("ADD", pod_netns, WEB._replace(container_id="deadbeef")).status == 0
    assert len(node.records) == 3
    return node


def test_gc_without_a_list_drops_nothing(attached: Node) -> None:
    """Absent, and null, which is how Go writes an absent list."""
    for keys in ({}, {"cni.dev/valid-attachments": None}):
        config = attached.config() | keys
        assert attached.call("GC", config=config).silent
    assert len(attached.records) == 3


@pytest.mark.parametrize("key", ["cni.dev/valid-attachments", "cni.dev/attachments"])
def test_gc_drops_what_is_not_listed_of_its_own_network(attached: Node, key: str) -> None:
    """Under either key; the other network's records stay, even with an empty list."""
    valid = {"containerID": WEB.container_id, "ifname": "eth0"}
    answer = attached.call("GC", config=attached.config(**{key: [valid]}))
    assert answer.silent
    assert answer.logged("deadbeef-eth0")
    assert attached.records == ["c0ffee-eth0", "c0ffee-net1"]
    assert attached.call("GC", config=attached.config(**{key: []})).silent
    assert attached.records == ["c0ffee-net1"]
    assert attached.call("GC", config=attached.config(**{key: []})).stderr == ""


def test_gc_cleans_up_around_what_it_cannot_read(attached: Node) -> None:
    """Strange things in the directory are passed over, the stale records go."""
    (attached.attachments / "folder").mkdir()
    (attached.attachments / "garbage").write_text("{")
    (attached.attachments / "link").symlink_to("/etc/passwd")
    (attached.attachments / ".c0ffee-eth0.4711").write_text("left by a killed ADD")
    (attached.attachments / ".c0ffee.lock").write_text("")
    config = attached.config(**{"cni.dev/valid-attachments": []})
    assert attached.call("GC", config=config).silent
    assert attached.records == ["c0ffee-net1", "folder", "garbage", "link"]


def test_a_held_stdin_does_not_hold_a_refusal() -> None:
    """What the environment alone tells is said without waiting for the configuration."""
    process = subprocess.Popen(
        [PROGRAM],
        env=environment("ADD", "", WEB),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["code"] == 4
        assert process.wait(10) == 1


def test_a_runtime_that_leaves_in_the_middle_gets_no_success(tmp_path: Path) -> None:
    """Nobody reads the answer: exit 1."""
    process = start(
        environment("ADD", "/run/netns/none", NOT_OURS),
        stdin(Node(tmp_path).config()),
        wrapper=["sh", "-c", 'sleep 0.2; exec "$0"'],
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.read()
    process.stderr.close()
    assert process.wait(10) == 1
