"""Ports, marks, ids, names and limits: one fact, one line, one source.

Everything that injected pods, ztunnel or dashboards rely on keeps the reference's value; limits
that are ours say so. Nothing here is computed, so importing it costs nothing on the exec path.
"""

VERSION = "0.1.0"

# -- CNI protocol (containernetworking/cni SPEC.md 1.1.0) --------------------------------------
SUPPORTED_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
NEWEST_VERSION = SUPPORTED_VERSIONS[-1]

# -- traffic capture (istio tools/istio-iptables, pkg/constants) -------------------------------
OUTBOUND_PORT = 15001  # Envoy's outbound listener
INBOUND_PORT = 15006  # Envoy's inbound listener
TUNNEL_PORT = 15008  # HBONE, never captured
DNS_PORT = 53
DNS_LISTENER_PORT = 15053  # the agent's DNS proxy
STATUS_PORTS = (
    "15020",
    "15021",
    "15090",
)  # merged metrics, health, Envoy metrics: never captured inbound
DEFAULT_EXCLUDED_OUTBOUND_PORT = "15020"
PROBE_PORT = 15002  # validation mode connects here
PROXY_ID = "1337"  # uid and gid of the proxy
PROXY_USER = "istio-proxy"
TPROXY_MARK = 1337  # inbound connections diverted to the proxy
OUTBOUND_MARK = 1338  # the proxy's own traffic on lo in TPROXY mode
TPROXY_TABLE = 133  # routing table of the diverted traffic
TPROXY_RULE_PRIORITY = 31337  # ours: a fixed priority makes adding the policy rule idempotent
ZONE_UPSTREAM = 1  # conntrack zone: DNS proxy <-> upstream resolver
ZONE_APPLICATION = 2  # conntrack zone: application <-> DNS proxy
LOOPBACK_V4 = "127.0.0.1/32"
LOOPBACK_V6 = "::1/128"
PASSTHROUGH_V4 = "127.0.0.6/32"  # source address of Envoy's inbound pass-through cluster
PASSTHROUGH_V6 = "::6/128"

CHAIN_PREFIX = "ISTIO_"
NFT_FAMILY = "inet"  # of our own nf_tables tables
NFT_NAT, NFT_MANGLE, NFT_RAW = "istio-proxy-nat", "istio-proxy-mangle", "istio-proxy-raw"
NFT_TABLES = (NFT_NAT, NFT_MANGLE, NFT_RAW)
NFT_GUARD = "istio-proxy-guard"  # ours: stands while these are replaced
MAX_OWNER_GROUPS_IPTABLES = 49  # iptables-restore 1.8.9 refuses a rule with more arguments
MAX_INTERFACE_NAME = 15  # IFNAMSIZ - 1

# -- Kubernetes --------------------------------------------------------------------------------
PROXY_CONTAINER = "istio-proxy"
INIT_CONTAINER = "istio-init"
PLUGIN_TYPE = "istio-cni"  # of our entry in a list of plugins, and the name of the program
AGENT_POD_PREFIX = "istio-cni-node-"
STATUS_ANNOTATION = "sidecar.istio.io/status"
MODE_ANNOTATION = "sidecar.istio.io/interceptionMode"
INJECT_KEY = "sidecar.istio.io/inject"  # a label, or else an annotation
CONFIG_SOURCE_ANNOTATION = (
    "kubernetes.io/config.source"  # set by the kubelet: "api", "file", "http"
)
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"  # on a static pod's mirror: the kubelet's pod uid
POD_ANNOTATIONS_CAPABILITY = "io.kubernetes.cri.pod-annotations"

# -- files -------------------------------------------------------------------------------------
RUN_DIR = "/var/run/istio-cni"
KUBECONFIG_FILE = "istio-cni-kubeconfig"
LOG_SOCKET = "log.sock"  # where the node agent takes lines of plugin processes
LOG_FILE = "istio-cni.log"
LOG_FILE_BYTES = 10 * 1024 * 1024  # then it is rotated; one backup, kept two days
LOG_BACKUP_MAX_AGE_S = 2 * 24 * 3600
ATTACHMENTS_DIR = "attachments"
BUNDLES_DIR = "istio-cni.d"  # beside the program: a directory for each version of the plugin
CURRENT_BUNDLE = "current"  # the link in there that leads to the one in use
AGENT_LINK = "agent.sock"  # the link in there that leads to the node agent's socket
LAUNCHER_FILE = "launcher"  # in a bundle; on the node it is the program
AGENT_SOCKET = "agent/agent.sock"  # in the run dir; the directory is the agent's alone

# -- limits (ours) -----------------------------------------------------------------------------
ADD_TIMEOUT_S = 20.0  # one ADD in process, all in all
LOOK_UP_TIMEOUT_S = 12.0  # part of it for the API server
LOOK_UP_SHARE = 0.6  # of what is left, where that is less
CHECK_TIMEOUT_S = 10.0
ROLLBACK_RESERVE_S = 4.0  # part of it kept for restoring the former state
LATE_ROLLBACK_S = 2.0  # for who finds all time over: it was stopped, and holds the lock still
DEL_UNDO_TIMEOUT_S = 1.0
STDIN_MAX_BYTES = 16 * 1024 * 1024
QUOTED_MAX_BYTES = 256  # of a foreign value in a log line, error or event
XTABLES_WAIT_S = 30  # `--wait` of iptables-legacy in CLI mode
