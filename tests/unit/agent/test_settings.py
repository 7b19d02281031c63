"""Settings: where each comes from, what is refused, and what the plugin gets of them."""

from __future__ import annotations

import pytest

from istio_cni.agent.node import entry_keys
from istio_cni.agent.settings import Inert, Settings, options, read_settings
from istio_cni.cni.request import lookup
from istio_cni.constants import VERSION
from istio_cni.errors import InvalidSettings
from istio_cni.install import plan
from istio_cni.plugin.annotations import capture_config
from istio_cni.plugin.netconf import Netconf
from istio_cni.plugin.pod import Pod


def problems(*argv: str, **env: str) -> tuple[str, ...]:
    """Read settings in vain; return the lines that people get."""
    with pytest.raises(InvalidSettings) as caught:
        read_settings(argv, env)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_a_flag_counts_before_its_variable_and_that_before_the_default() -> None:
    """Whichever way the flag is written."""
    assert read_settings((), {}).health_port == 8000
    assert read_settings((), {"HEALTH_PORT": "1"}).health_port == 1
    assert read_settings(("--health-port=2",), {"HEALTH_PORT": "1"}).health_port == 2
    assert read_settings(("--health-port", "2"), {"HEALTH_PORT": "junk"}).health_port == 2


def test_the_references_names_and_defaults_are_kept() -> None:
    """Charts and flags of today go on working."""
    found = {option.variable: option.default for option in options()}
    assert found["MOUNTED_CNI_NET_DIR"] == "/host/etc/cni/net.d"
    assert found["CNI_AGENT_RUN_DIR"] == "/var/run/istio-cni"
    assert found["KUBECONFIG_MODE"] == "0600"
    assert found["CHAINED_CNI_PLUGIN"] == "true"
    assert found["REPAIR_INIT_CONTAINER_EXIT_CODE"] == "126"
    assert found["MONITORING_PORT"] == "15014"
    assert found["ZTUNNEL_UDS_ADDRESS"] == "/var/run/ztunnel/ztunnel.sock"


def test_every_default_is_what_its_text_would_give() -> None:
    """What help and documentation show can be written down and means the same."""
    env = {option.variable: option.default for option in options()}
    assert read_settings((), env) == Settings()


def test_a_variable_that_is_empty_is_set() -> None:
    """To nothing, to false, to 0; where that cannot be it is refused."""
    env = {"CNI_CONF_NAME": "", "SKIP_TLS_VERIFY": "", "MONITORING_PORT": "", "KUBE_CA_FILE": ""}
    found = read_settings((), {**env, "OUTBOUND_OWNER_GROUPS": ""})
    assert (found.cni_conf_name, found.skip_tls_verify, found.monitoring_port) == ("", False, 0)
    assert found.outbound_owner_groups == ""
    for name in ("KUBECONFIG_MODE", "HEALTH_PORT", "LOG_LEVEL", "MOUNTED_CNI_NET_DIR"):
        (line,) = problems(**{name: ""})
        assert line.startswith(f'{name}: "" is not allowed; allowed: ')
    assert "CHAINED_CNI_PLUGIN" in problems(CHAINED_CNI_PLUGIN="")[0]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--kubeconfig-mode=384", '"384" is not allowed; allowed: a file mode in octal'),
        ("--kubeconfig-mode=0o600", "a file mode in octal, such as 0600"),
        ("--skip-tls-verify=yes", "true or false"),
        ("--health-port=0", "a port, 1 to 65535"),
        ("--monitoring-port=many", "a number"),
        ("--log-level=loud", "debug, info, warn, error"),
        ("--plugin-log-level=loud", "debug, info, warn, error, fatal, none"),
        ("--mounted-cni-net-dir=net.d", "an absolute path"),
        ("--kube-ca-file=ca.crt", "an absolute path"),
        ("--cni-conf-name=../x", "a file name"),
        ("--cni-conf-name=..", "a file name"),
        ("--exclude-namespaces=a,B", "names of namespaces, separated by commas"),
        ("--force-iptables-binary=new", '"", legacy, nft'),
        ("--backend=ipvs", "auto, iptables, nftables"),
        ("--outbound-owner-groups=root", "a node's names mean nothing in a pod"),
        ("--outbound-owner-groups=" + ",".join(map(str, range(50))), "at most 49"),
        ("--host-ipv4-loopback-cidr=10.0.0.0/8", "an IPv4 CIDR inside 127.0.0.0/8"),
        ("--plugin-service-account=", "a name of Kubernetes"),
        ("--plugin-service-account=a/b", "a name of Kubernetes"),
        ("--ambient-enabled", "false; true is not part of this version"),
        ("--native-nftables=2", "true or false"),
        ("--istio-owned-cni-config=T", "false; true is not part of this version"),
        ("--chained-cni-plugin=f", "true; false is not part of this version"),
        ("--cni-conf-name", "a value is missing"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_allowed(argv: str, line: str) -> None:
    """From a flag as from a variable."""
    (said,) = problems(argv)
    flag, equals, value = argv.partition("=")
    assert said.startswith(f"{flag}: ")
    assert line in said
    variable = flag[2:].replace("-", "_").upper()
    if equals:
        assert problems(**{variable: value}) == (said.replace(flag, variable, 1),)


def test_all_problems_are_told_at_once() -> None:
    """Unknown flags and stray words among them; unknown variables are not ours."""
    found = problems("--bogus=1", "word", "--health-port=x", LOG_LEVEL="y", BOGUS="1")
    assert len(found) == 4


def test_a_foreign_value_cannot_forge_a_line() -> None:
    """It is quoted and cut."""
    (line,) = problems(LOG_LEVEL="a\ninstall-cni: all is well" + 500 * "x")
    assert "\\n" in line
    assert len(line) < 400


def test_lists_are_trimmed() -> None:
    """As the reference does: blanks and empty items go."""
    found = read_settings((), {"EXCLUDE_NAMESPACES": " kube-system, ,shop,shop"})
    assert found.exclude_namespaces == ("kube-system", "shop")


def test_repair_is_told_of_only_if_somebody_wishes_it() -> None:
    """It is on by default in the reference, so a default says nothing."""
    assert read_settings((), {}).repair_wishes() == []
    env = {"REPAIR_ENABLED": "true", "REPAIR_REPAIR_PODS": "true", "REPAIR_LABEL_PODS": "false"}
    assert read_settings((), env).repair_wishes() == ["repair_enabled", "repair_repair_pods"]


def test_the_log_shows_what_has_an_effect() -> None:
    """All of it, as people write it; options that are accepted in vain are not there."""
    found = read_settings((), {"EXCLUDE_NAMESPACES": "a,b"}).effective()
    assert found["kubeconfig_mode"] == "0600"
    assert found["exclude_namespaces"] == "a,b"
    assert not found.keys() & Inert.model_fields.keys()
    assert found.keys() | Inert.model_fields.keys() == Settings.model_fields.keys()


def test_help_names_every_option_with_its_variable_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page is made of the table."""
    with pytest.raises(SystemExit) as caught:
        read_settings(("--help",), {"HEALTH_PORT": "junk"})
    assert caught.value.code == 0
    page = " ".join(capsys.readouterr().out.split())
    for option in options():
        assert f"{option.flag} [" in page
        default = option.default or "empty"
        assert f"(default: {default}; variable: {option.variable})" in page


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With the program's name, as all programs do."""
    with pytest.raises(SystemExit):
        read_settings(("--version",), {})
    assert capsys.readouterr().out == f"install-cni {VERSION}\n"


EVERYTHING = {
    "EXCLUDE_NAMESPACES": "kube-system,infra",
    "PLUGIN_LOG_LEVEL": "debug",
    "FORCE_IPTABLES_BINARY": "legacy",
    "BACKEND": "iptables",
    "STRICT_ANNOTATIONS": "true",
    "OUTBOUND_OWNER_GROUPS": "1000,2000-2010",
    "OUTBOUND_OWNER_GROUPS_EXCLUDE": "3000",
    "HOST_IPV4_LOOPBACK_CIDR": "127.0.0.0/8",
}


@pytest.mark.parametrize("env", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_plugin_accepts_what_the_settings_allow(env: dict[str, str]) -> None:
    """An entry that is refused would keep every pod of the mesh from starting."""
    entry = plan.entry(entry_keys(read_settings((), env), "mesh"))
    netconf = Netconf(entry)
    assert netconf.problems == []
    capture_config(Pod({}), netconf)
    assert netconf.pod_namespace == "mesh"
    assert netconf.exclude_namespaces == set(env.get("EXCLUDE_NAMESPACES", "").split(",")) - {""}
    assert lookup(entry, "capabilities") == {"io.kubernetes.cri.pod-annotations": True}


def test_keys_of_ours_are_written_only_where_they_differ() -> None:
    """The reference's are always there, its booleans false."""
    reference = {
        "plugin_log_level": "info",
        "cni_agent_run_dir": "/var/run/istio-cni",
        "ambient_enabled": False,
        "exclude_namespaces": [],
        "pod_namespace": "mesh",
        "native_nftables": False,
        "enable_ambient_detection_retry": False,
    }
    assert entry_keys(read_settings((), {}), "mesh") == reference
    changed = entry_keys(read_settings((), EVERYTHING), "mesh")
    assert changed.keys() - reference.keys() == {
        "iptables_variant", "backend", "strict_annotations", "outbound_owner_groups",
        "outbound_owner_groups_exclude", "host_ipv4_loopback_cidr",
    }  # fmt: skip
    nobody = entry_keys(read_settings((), {"OUTBOUND_OWNER_GROUPS": ""}), "mesh")
    assert nobody["outbound_owner_groups"] == ""
