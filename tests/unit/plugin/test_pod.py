"""What is read from a pod's object, whatever the object looks like."""

from __future__ import annotations

import itertools

import pytest

from istio_cni.plugin.pod import Pod
from istio_cni.plugin.select import after_look_up

JSON = dict[str, object]
GARBAGE: tuple[object, ...] = (None, "", "text", 5, 1.5, True, [], [[]], [None], {}, {"a": None})


def of(*containers: JSON, init: tuple[JSON, ...] = ()) -> Pod:
    """Make a pod of containers."""
    return Pod({"spec": {"containers": [*containers], "initContainers": [*init]}})


def proxy(**fields: object) -> JSON:
    """Make a proxy container."""
    return {"name": "istio-proxy", **fields}


def test_everything_is_where_the_api_has_it() -> None:
    """Metadata, host network, and the names of init and regular containers."""
    pod = Pod(
        {
            "metadata": {
                "name": "web",
                "namespace": "shop",
                "uid": "u",
                "labels": {"a": "1"},
                "annotations": {"b": "2"},
            },
            "spec": {
                "hostNetwork": True,
                "containers": [{"name": "app"}],
                "initContainers": [{"name": "setup"}],
                "ephemeralContainers": [{"name": "debug"}],
            },
        }
    )
    assert (pod.namespace, pod.name, pod.uid) == ("shop", "web", "u")
    assert (pod.labels, pod.annotations) == ({"a": "1"}, {"b": "2"})
    assert pod.host_network
    assert pod.containers == ("setup", "app")
    assert pod.proxy is None


def test_an_object_without_namespace_is_in_the_default_one() -> None:
    """As a manifest that kubectl is given."""
    assert Pod({"metadata": {"name": "web"}}).namespace == "default"


@pytest.mark.parametrize(
    "path",
    [
        ("metadata",),
        ("metadata", "name"),
        ("metadata", "annotations"),
        ("metadata", "labels"),
        ("metadata", "uid"),
        ("spec",),
        ("spec", "hostNetwork"),
        ("spec", "containers"),
        ("spec", "initContainers"),
    ],
)
def test_a_malformed_object_never_crashes(path: tuple[str, ...]) -> None:
    """It is one that is not captured, or not by what cannot be read."""
    for value in GARBAGE:
        whole: JSON = {"metadata": {"name": "web"}, "spec": {"containers": [proxy()]}}
        parent = whole
        for key in path[:-1]:
            child = parent[key]
            assert isinstance(child, dict)
            parent = child
        parent[path[-1]] = value
        after_look_up(Pod(whole))


@pytest.mark.parametrize("key", ["name", "args", "env", "securityContext"])
def test_a_malformed_container_never_crashes(key: str) -> None:
    """A proxy without usable fields has their defaults."""
    for value in GARBAGE:
        pod = of(proxy(**{key: value}))
        after_look_up(pod)
        if key != "name":
            assert pod.proxy is not None
            assert (pod.proxy.kind, pod.proxy.uid, pod.proxy.gid) == ("", None, None)


def test_malformed_entries_never_crash() -> None:
    """Neither in lists of variables and arguments nor in the proxy's security context."""
    for first, second in itertools.product(GARBAGE, repeat=2):
        variable = {"name": first, "value": second, "valueFrom": first}
        security = {"runAsUser": first, "runAsGroup": second}
        pod = of(proxy(env=[variable, first], args=[first, second], securityContext=security))
        after_look_up(pod)
        assert pod.proxy is not None
        assert all(isinstance(name, str) for name in pod.proxy.env)


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (["proxy", "sidecar"], "sidecar"),
        (["proxy", "router", "--log"], "router"),
        (["proxy"], ""),
        (["--x", "proxy", "router"], ""),
        ([], ""),
        (None, ""),
    ],
)
def test_the_proxy_s_type_is_its_second_argument(args: object, kind: str) -> None:
    """If the first one is `proxy`."""
    pod = of(proxy(args=args))
    assert pod.proxy is not None
    assert pod.proxy.kind == kind


def test_ids_come_from_the_container_only() -> None:
    """The pod's security context is not the proxy's."""
    pod = Pod(
        {
            "spec": {
                "securityContext": {"runAsUser": 1, "runAsGroup": 2},
                "containers": [proxy(securityContext={"runAsUser": 3})],
            }
        }
    )
    assert pod.proxy is not None
    assert (pod.proxy.uid, pod.proxy.gid) == (3, None)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ({"value": "true"}, "true"),
        ({"value": ""}, ""),
        ({}, ""),
        ({"value": None}, ""),
        ({"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}, None),
        ({"value": None, "valueFrom": {"secretKeyRef": {}}}, None),
        ({"value": True}, "true"),  # a manifest's, without quotes
        ({"value": False}, "false"),
        ({"value": 1}, "1"),
    ],
)
def test_a_variable_has_a_literal_value_or_none(variable: JSON, value: str | None) -> None:
    """What comes from a field, a Secret or a ConfigMap is not in the object."""
    pod = of(proxy(env=[{"name": "X", **variable}]))
    assert pod.proxy is not None
    assert pod.proxy.env == {"X": value}


def test_a_native_sidecar_is_a_proxy() -> None:
    """One among the init containers, known by its name alone."""
    pod = of({"name": "app"}, init=(proxy(env=[{"name": "A", "value": "1"}]),))
    assert pod.proxy is not None
    assert pod.proxy.env == {"A": "1"}
    assert pod.containers == ("istio-proxy", "app")


def test_of_two_proxies_the_regular_one_counts_and_environments_merge() -> None:
    """Later values win, also within one container."""
    twice = [{"name": "B", "value": "0"}, {"name": "B", "value": "2"}]
    first = proxy(
        args=["proxy", "router"],
        securityContext={"runAsUser": 1, "runAsGroup": 1},
        env=[{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
    )
    second = proxy(args=["proxy", "sidecar"], securityContext={"runAsUser": 2}, env=twice)
    pod = of(second, init=(first,))
    assert pod.proxy is not None
    assert (pod.proxy.kind, pod.proxy.uid, pod.proxy.gid) == ("sidecar", 2, None)
    assert pod.proxy.env == {"A": "1", "B": "2"}
