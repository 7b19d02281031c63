"""What a pod pays for before its first decision: the modules that are loaded, and when."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIBRARIES = {"pydantic", "kubernetes", "pyroute2", "iptc", "yaml"}
EXPENSIVE = {
    *("json", "re", "enum", "typing", "dataclasses", "logging", "subprocess", "socket", "ssl"),
    *("http", "urllib", "ipaddress", "contextlib", "argparse", "ctypes", "tempfile", "shutil"),
    *("traceback", "difflib", "threading", "collections", "functools", "inspect", "pathlib"),
}
MAIN = """
import sys
from istio_cni.plugin.main import run
status = run() if sys.argv[1:] == ["run"] else 0
sys.stderr.write("loaded: " + " ".join(sys.modules))
sys.exit(status)
"""


def loaded(*arguments: str, stdin: str = "", **env: str) -> set[str]:
    """Return the top-level modules in a fresh interpreter after it loaded, or ran, the plugin.

    What the interpreter itself had loaded by then is left out.
    """
    bare = [sys.executable, "-I", "-c", "import sys; print(*sys.modules)"]
    before = set(subprocess.check_output(bare, text=True, env={}).split())
    done = subprocess.run(
        [sys.executable, "-I", "-c", MAIN, *arguments],
        input=stdin,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    after = set(done.stderr.rpartition("loaded: ")[2].split())
    assert "istio_cni.plugin.main" in after
    return {name.partition(".")[0] for name in after - before}


def add(namespace: str, **keys: object) -> dict[str, str]:
    """Make an ADD."""
    config = {
        "cniVersion": "1.1.0",
        "name": "k8s",
        "type": "istio-cni",
        "cni_agent_run_dir": "/nonexistent",
        "exclude_namespaces": ["kube-system"],
        "prevResult": {"cniVersion": "1.1.0", "ips": [{"address": "10.1.0.5/24"}], "x": 1.50},
        **keys,
    }
    return {
        "stdin": json.dumps(config),
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "c1",
        "CNI_NETNS": "/nonexistent/netns",
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": f"K8S_POD_NAMESPACE={namespace};K8S_POD_NAME=web",
    }


NATIVE_MODULES = ("nftables", "nfnetlink", "nfdump")
HANDED_OVER = {"io.kubernetes.cri.pod-annotations": {"kubernetes.io/config.source": "api"}}


def test_the_plugin_starts_light() -> None:
    """The entry point loads none of the modules that would cost every pod start-up time."""
    assert not (LIBRARIES | EXPENSIVE) & loaded()


def test_version_loads_nothing_more() -> None:
    """Not even what every other verb needs."""
    found = loaded("run", CNI_COMMAND="VERSION")
    assert found == loaded()


@pytest.mark.parametrize(
    "call",
    [
        add("kube-system"),
        add("kube-system", plugin_log_level="debug"),
        add("shop", runtimeConfig=HANDED_OVER),
        add("shop") | {"CNI_ARGS": ""},
    ],
    ids=["excluded", "debug", "handed over", "no pod"],
)
def test_a_pod_that_is_left_alone_without_look_up_stays_light(call: dict[str, str]) -> None:
    """Decided, logged and answered, without one of the expensive modules."""
    assert not (LIBRARIES | EXPENSIVE) & loaded("run", **call)


def test_a_pod_that_is_looked_up_needs_no_library(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A kubeconfig or manifest in JSON, as programs write it, does not load YAML either."""
    directory = tmp_path_factory.mktemp("pods")
    pod = {
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": "web"},
        "spec": {"containers": []},
    }
    (directory / "web.json").write_text(json.dumps(pod))
    found = loaded("run", **add("shop", pod_source=f"manifests:{directory}"))
    assert not LIBRARIES & found
    assert not {"subprocess", "ssl", "ctypes", "ipaddress", "logging", "dataclasses"} & found


def test_iptables_does_not_pay_for_nf_tables() -> None:
    """A pod that is programmed through iptables loads nothing of the other back end."""
    code = "import sys, istio_cni.plugin.program, istio_cni.capture.iptables; print(*sys.modules)"
    found = subprocess.check_output([sys.executable, "-I", "-c", code], text=True, env={}).split()
    native = {"istio_cni.capture.native", *(f"istio_cni.rules.{n}" for n in NATIVE_MODULES)}
    assert not (native | {"hashlib"}) & set(found)


BROKEN = ("{", '{"a"', '{"a" 1}', '{"a":1', '{"a":1,}', "{'a':1}", '"abc', '{"a":"x', '{"a":"\\q"}')


@pytest.mark.parametrize("stdin", [*BROKEN, '{"a":"\x01"}', "[1,", '{"a":tru}'])
@pytest.mark.parametrize("verb", ["ADD", "DEL", "GC"])
def test_broken_json_is_answered_in_a_fresh_process(verb: str, stdin: str) -> None:
    """The light parser cannot raise its own errors there; the answer is code 6, no traceback."""
    call = add("shop") | {"CNI_COMMAND": verb}
    del call["stdin"]
    main = "from istio_cni.plugin.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-c", main],
        input=stdin,
        env=call,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["code"] == 6
    assert "Traceback" not in done.stderr
