"""Pods from a directory: what counts as a manifest, which pod is meant, and what is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from istio_cni.edge.manifests import load_pod
from istio_cni.errors import InvalidParameter, IOFailure, PodLookupFailed

Pod = dict[str, object]

SPEC = "spec: {containers: [{name: app}]}\n"
WEB = f"apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\n{SPEC}"


def anyone(_pod: Pod) -> bool:
    """Accept whatever has the name."""
    return True


def load(directory: Path, name: str = "web", namespace: str = "default") -> Pod:
    """Look a pod up whose uid does not matter."""
    return load_pod(str(directory), namespace, name, anyone)


def refusal(directory: Path, name: str = "web") -> str:
    """Look a pod up that is not to be had; the message is one line and names the directory."""
    with pytest.raises(PodLookupFailed) as caught:
        load(directory, name)
    message = str(caught.value)
    assert str(directory) in message
    assert "\n" not in message
    return message


def pod(name: str, namespace: str = "", **metadata: object) -> Pod:
    """Describe a pod."""
    about = {"name": name, **({"namespace": namespace} if namespace else {}), **metadata}
    spec = {"containers": [{"name": "app"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.yaml", WEB),
        ("a.yml", WEB),
        ("a.json", json.dumps(pod("web"))),
        ("a.json", json.dumps(pod("web", "default"))),
        ("a.yaml", f"---\n---\nkind: Service\nmetadata: {{name: web}}\n---\n{WEB}"),
        ("a.json", json.dumps({"kind": "List", "items": [{"kind": "Node"}, pod("web")]})),
        ("a.yaml", json.dumps({"kind": "List", "items": [pod("web")]})),
    ],
)
def test_a_pod_is_found_in_every_form_of_manifest(tmp_path: Path, file: str, text: str) -> None:
    """YAML and JSON, several documents and Lists; a pod without namespace is in default."""
    (tmp_path / file).write_text(text)
    found = load(tmp_path)
    metadata = found["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["name"] == "web"


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    """A mounted ConfigMap is a directory of links."""
    data = tmp_path / "..data"
    data.mkdir()
    (data / "web.yaml").write_text(WEB)
    (tmp_path / "web.yaml").symlink_to("..data/web.yaml")
    assert load(tmp_path)["kind"] == "Pod"


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    """It may be the manifest that was meant; it hides no other."""
    (tmp_path / "a.yaml").symlink_to("a.yaml")
    (tmp_path / "b.yaml").symlink_to("nowhere")
    message = refusal(tmp_path)
    assert 'a.yaml": Too many levels of symbolic links' in message
    assert 'b.yaml": No such file or directory' in message
    (tmp_path / "c.yaml").write_text(WEB)
    assert load(tmp_path)["kind"] == "Pod"


@pytest.mark.parametrize("namespace", ["", "shop"])
def test_the_namespace_counts(tmp_path: Path, namespace: str) -> None:
    """Pods of one name in two namespaces are two pods."""
    (tmp_path / "a.json").write_text(json.dumps(pod("web", namespace=namespace, uid="1")))
    (tmp_path / "b.json").write_text(json.dumps(pod("web", namespace="other", uid="2")))
    assert (
        load(tmp_path, namespace=namespace or "default")["metadata"]
        == (pod("web", namespace=namespace, uid="1")["metadata"])
    )


def test_what_is_no_pod_manifest_does_not_matter(tmp_path: Path) -> None:
    """Other files, directories and other kinds are passed over without a word."""
    (tmp_path / "README.md").write_text("not: [yaml")
    (tmp_path / "dir.yaml").mkdir()
    (tmp_path / ".web.yaml").write_text(WEB)
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "job.yaml").write_text("kind: Job\nmetadata: {name: web}\n")
    (tmp_path / "odd.yaml").write_text("kind: Pod\n---\nkind: List\nitems: 3\n")
    message = refusal(tmp_path)
    assert 'no manifest of pod "default/web"' in message
    assert "problems" not in message


def test_not_found_tells_at_most_five_pods(tmp_path: Path) -> None:
    """The message helps to find a misspelt name without becoming a listing."""
    items = [pod(f"p{n}", "shop") for n in range(7)]
    (tmp_path / "a.json").write_text(json.dumps({"kind": "List", "items": items}))
    message = refusal(tmp_path)
    assert 'which holds "shop/p0", ' in message
    assert '"shop/p4" and 2 more' in message
    assert "p5" not in message


def test_an_empty_directory_holds_no_pod(tmp_path: Path) -> None:
    """The message says so."""
    assert "which holds no pod" in refusal(tmp_path)


def test_a_broken_file_does_not_hide_the_pod(tmp_path: Path) -> None:
    """The pod is found before, behind and even inside files with problems."""
    (tmp_path / "a.yaml").write_text("a: b: c")
    (tmp_path / "b.yaml").write_text(f"{WEB}---\na: b: c\n")
    (tmp_path / "c.json").write_text("{")
    assert load(tmp_path)["kind"] == "Pod"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("a.yaml", "kind: Pod\nmetadata:\n  name: [web\n", 'a.yaml" line 4: not YAML'),
        ("a.json", '{\n"kind": "Pod",\n}', 'a.json" line 3: not JSON'),
        ("a.json", "[" * 100_000, 'a.json": not JSON'),
        ("a.yaml", "when: 2024-13-01", 'a.yaml": not YAML'),
        ("a.yaml", "\x00", 'a.yaml": not YAML'),
        ("a.yaml", "a: !!bool maybe", 'a.yaml": not YAML'),
        ("a.yaml", "a: !!int _", 'a.yaml": not YAML'),
        ("a.yaml", "- kind: Pod", 'a.yaml": holds a document that is no object'),
        ("a.json", "3", 'a.json": holds a document that is no object'),
        ("a.json", " " * (1024 * 1024 + 1), 'a.json": larger than 1 MiB'),
        ("a.yaml", "a: 1\nb: 2\n'a': 3", 'a.yaml" line 3: not YAML: "the key a is there twice"'),
        ("a.json", '{"a\\u001b": 1, "a\\u001b": 2}', r'"the key a\u001b is there twice"'),
        ("a.yaml", f"a: {':'.join('1' * 99)}", "a number is too long"),
        ("a.yaml", "kind: Pod\nmetadata: {name: 5}", "metadata.name is of type int"),
        ("a.yaml", "kind: Pod\nmetadata: {name: a, namespace: [b]}", "namespace is of type list"),
        ("a.yaml", "kind: Pod\nmetadata: [web]", "metadata is of type list"),
    ],
)
def test_problems_are_told_when_the_pod_is_not_found(
    tmp_path: Path, file: str, text: str, said: str
) -> None:
    """Then the broken file may be the one that was meant: file and line, if there is one."""
    (tmp_path / file).write_text(text)
    message = refusal(tmp_path)
    assert "files with problems: " in message
    assert said in message


def test_a_pod_described_twice_is_refused(tmp_path: Path) -> None:
    """Nobody can tell which one is meant; both files are named."""
    (tmp_path / "a.yaml").write_text(WEB)
    (tmp_path / "b.yaml").write_text(WEB)
    message = refusal(tmp_path)
    assert "more than once" in message
    assert 'a.yaml" and "' in message
    assert 'b.yaml"' in message


def test_the_predicate_picks_one_of_two(tmp_path: Path) -> None:
    """Descriptions of a pod and its successor can lie side by side if they have uids."""
    for uid in ("1", "2"):
        (tmp_path / f"{uid}.json").write_text(json.dumps(pod("web", uid=uid)))

    def second(candidate: Pod) -> bool:
        metadata = candidate["metadata"]
        return isinstance(metadata, dict) and metadata["uid"] == "2"

    assert load_pod(str(tmp_path), "default", "web", second) == pod("web", uid="2")


def test_another_uid_is_told(tmp_path: Path) -> None:
    """A pod of that name which is not the one is mentioned as such."""
    (tmp_path / "a.yaml").write_text(WEB)
    with pytest.raises(PodLookupFailed, match="default/web with another uid"):
        load_pod(str(tmp_path), "default", "web", lambda _pod: False)


MENDED = {
    "true": 'of type bool, true; expected is a string: put it in quotes, as in "true"',
    "1": 'of type int, 1; expected is a string: put it in quotes, as in "1"',
    "[a]": "is of type list; expected is a string",
    "null": 'has no value; expected is a string: write "" or remove it',
}


@pytest.mark.parametrize("value", MENDED)
@pytest.mark.parametrize("field", ["labels", "annotations"])
def test_annotations_must_be_strings(tmp_path: Path, field: str, value: str) -> None:
    """YAML makes booleans of unquoted words; the API server refuses those, and so do we."""
    metadata = f"{{name: web, {field}: {{sidecar.istio.io/inject: {value}}}}}"
    (tmp_path / "a.yaml").write_text(f"kind: Pod\nmetadata: {metadata}\n{SPEC}")
    with pytest.raises(InvalidParameter) as caught:
        load(tmp_path)
    assert f'pod "default/web": metadata.{field} "sidecar.istio.io/inject" ' in str(caught.value)
    assert str(caught.value).endswith(MENDED[value])


@pytest.mark.parametrize(
    ("metadata", "spec", "said"),
    [
        ("labels: [a]", SPEC, "metadata.labels is of type list; expected is a mapping"),
        ("annotations: ", SPEC, "metadata.annotations has no value; expected is a mapping"),
        ("labels: {1: a}", SPEC, "metadata.labels 1: the key is of type int, 1"),
        (r'labels: {"a\n\e[2J": 1}', SPEC, r'metadata.labels "a\n\u001b[2J" is of type int'),
        ("", "", "spec has no value; expected is a mapping"),
        ("", "spec: [a]", "spec is of type list"),
        ("", "spec: {}", "spec.containers has no value; expected is a list"),
        ("", "spec: {containers: {name: a}}", "spec.containers is of type dict"),
        ("", "spec: {containers: [a]}", 'spec.containers[0] is of type str, "a"'),
        ("", "spec: {containers: [{name: 1}]}", "spec.containers[0].name is of type int, 1"),
        ("", "spec: {containers: [], initContainers: a}", "spec.initContainers is of type str"),
        ("", 'spec: {containers: [], hostNetwork: "true"}', 'spec.hostNetwork is of type str, "t'),
        ("", "spec: {containers: [], hostNetwork: 1}", "expected is true or false"),
    ],
)
def test_a_pod_that_is_not_in_form_is_refused(
    tmp_path: Path, metadata: str, spec: str, said: str
) -> None:
    """It would pass for one that wants no capture; others are not concerned."""
    (tmp_path / "a.yaml").write_text(f"kind: Pod\nmetadata: {{name: web, {metadata}}}\n{spec}")
    (tmp_path / "b.json").write_text(json.dumps(pod("other")))
    with pytest.raises(InvalidParameter) as caught:
        load(tmp_path)
    assert 'a.yaml": pod "default/web": ' in str(caught.value)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert load(tmp_path, "other")["kind"] == "Pod"


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ("args: proxy", 'args is of type str, "proxy"; expected is a list'),
        ("args: [proxy, 1]", "args[1] is of type int, 1"),
        ("env: {A: b}", "env is of type dict"),
        ("env: [A]", 'env[0] is of type str, "A"'),
        ("env: [{name: true}]", "env[0].name is of type bool, true"),
        ("env: [{name: A, value: [b]}]", "env[0].value is of type list"),
        ("securityContext: [a]", "securityContext is of type list"),
        ('securityContext: {runAsUser: "1"}', 'runAsUser is of type str, "1"'),
        ("securityContext: {runAsGroup: true}", "runAsGroup is of type bool, true"),
        ("securityContext: {runAsGroup: }", "runAsGroup has no value; expected is an integer"),
    ],
)
@pytest.mark.parametrize("field", ["containers", "initContainers"])
def test_a_container_that_is_not_in_form_is_refused(
    tmp_path: Path, field: str, container: str, said: str
) -> None:
    """With the place of what is wrong."""
    spec = f"spec:\n  {field}: [{{name: istio-proxy, {container}}}]\n"
    spec += "" if field == "containers" else "  containers: []\n"
    (tmp_path / "a.yaml").write_text(f"kind: Pod\nmetadata: {{name: web}}\n{spec}")
    with pytest.raises(InvalidParameter) as caught:
        load(tmp_path)
    assert f"spec.{field}[0]." in str(caught.value)
    assert said in str(caught.value)


def test_merged_keys_are_not_there_twice(tmp_path: Path) -> None:
    """What a mapping says itself wins over what it merges in."""
    text = "a: &a {name: x, uid: u}\nkind: Pod\nmetadata:\n  <<: *a\n  name: web\n"
    (tmp_path / "a.yaml").write_text(text + SPEC)
    assert load(tmp_path)["metadata"] == {"name": "web", "uid": "u"}


@pytest.mark.parametrize("place", ["metadata: {name: *z}", "metadata: {name: x, namespace: *z}"])
def test_aliases_cost_nothing(tmp_path: Path, place: str) -> None:
    """A value of 10^26 elements in a few lines is never printed; the pod beside it is found."""
    levels = "abcdefghijklmnopqrstuvwxyz"
    lines = ["a: &a [x]"]
    for inner, outer in pairwise(levels):
        lines.append(f"{outer}: &{outer} [{', '.join([f'*{inner}'] * 10)}]")
    (tmp_path / "a.yaml").write_text("\n".join([*lines, "kind: Pod", place]))
    assert "is of type list, not a string" in refusal(tmp_path)
    (tmp_path / "b.yaml").write_text(WEB)
    assert load(tmp_path)["kind"] == "Pod"
    text = "\n".join([*lines, "kind: Pod", "metadata: {name: bomb, labels: {a: *z}}", SPEC])
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InvalidParameter, match='labels "a" is of type list'):
        load(tmp_path, "bomb")


def test_merging_is_bounded(tmp_path: Path) -> None:
    """A mapping merged again and again takes its keys' time each time."""
    keys = ", ".join(f"k{n}: 1" for n in range(1000))
    merges = ", ".join(["*a"] * 1100)
    (tmp_path / "a.yaml").write_text(f"a: &a {{{keys}}}\nb: {{<<: [{merges}]}}\n")
    assert "merging (<<) makes it too large" in refusal(tmp_path)


def test_a_list_of_aliases_is_bounded(tmp_path: Path) -> None:
    """Many containers that are one, each with many variables that are one."""
    many = ", ".join(["*v"] * 1000)
    env = f"v: &v {{name: A}}\nc: &c {{name: app, env: [{many}]}}\n"
    spec = f"spec: {{containers: [{many.replace('v', 'c')}]}}\n"
    (tmp_path / "a.yaml").write_text(f"{env}kind: Pod\nmetadata: {{name: web}}\n{spec}")
    with pytest.raises(InvalidParameter, match="at most 100000 entries"):
        load(tmp_path)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    """The message names the setting that leads there."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(IOFailure, match="pod_source must be manifests:DIR") as caught:
            load(path)
        assert str(path) in str(caught.value)


def test_json_manifests_do_not_load_yaml(tmp_path: Path) -> None:
    """A directory of JSON files costs no PyYAML."""
    (tmp_path / "a.json").write_text(json.dumps(pod("web")))
    code = (
        "import sys; from istio_cni.edge.manifests import load_pod\n"
        "load_pod(sys.argv[1], 'default', 'web', lambda pod: True); print(*sys.modules)"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    assert "yaml" not in subprocess.check_output(command, text=True).split()
