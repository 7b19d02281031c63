"""The node agent's life: what is started in which order, and ended in the opposite one.

Logs, health and the socket for the launcher come first, so that a plugin that has just been
installed finds somebody to ask, and none of them needs the API server. What keeps one of them from
working costs the node speed, not its pods: the plugin can do all by itself.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from istio_cni.agent import call, log, node
from istio_cni.agent.health import HealthServer, serve_monitoring
from istio_cni.agent.memory import look_seldom, share_one_arena
from istio_cni.agent.metrics import Metrics
from istio_cni.agent.plugin_log import Lines, PluginLog
from istio_cni.agent.pods import PodCache
from istio_cni.agent.server import Server
from istio_cni.agent.settings import Settings
from istio_cni.agent.workshop import Workshop
from istio_cni.constants import VERSION
from istio_cni.edge.kube.watch import NodePods
from istio_cni.errors import IOFailure, IstioCNIError
from istio_cni.install.run import LOOK_EVERY_S, Installer

LOG = logging.getLogger("cni-agent")
FINISH_S = 10.0  # for calls that were taken in; as long as the slowest may take


def run(
    settings: Settings,
    env: Mapping[str, str],
    output: log.Output,
    workshop: Workshop,
    is_over: Callable[[float], bool],
) -> None:
    """Install, serve, look every second, and take everything away when it is time to end.

    `is_over` waits so many seconds at most, and tells whether it is.
    """
    share_one_arena()
    pod = node.own_pod(settings, env)
    LOG.info("install-cni %s", VERSION, extra={"settings": settings.effective()})
    if wishes := settings.repair_wishes():
        LOG.warning("repair is not part of this version; set in vain: %s", ", ".join(wishes))
    view = node.view(settings)
    workshop.begin(view.mounts)
    node_backend = _node_backend(settings, workshop)
    metrics = Metrics()
    installer = Installer(node.parts(settings, env, pod, node_backend), metrics.installed)
    metrics.watch_install(lambda: not installer.missing)
    with ExitStack() as undo:
        _serve_http(settings, output, installer, metrics, undo)
        cache = _follow_pods(settings, env, metrics, undo)
        if view.host_netns is not None and view.own_netns is not None:
            shared = call.Node(
                view.host_netns,
                view.own_netns,
                workshop,
                cache.find if cache is not None else lambda *_: None,
                output.sink,
                metrics,
                node_backend,
                settings.cni_agent_run_dir if view.mounts is not None else "",
            )
            _serve_launcher(settings, shared, undo)
        delay_s, settled = 0.0, False
        while not is_over(delay_s):
            installer.look()
            if not settled and (cache is None or cache.is_synced):
                settled = True
                _leave_to_stay()
            delay_s = LOOK_EVERY_S
        LOG.info("told to end: the plugin is taken off this node; pods that run stay captured")
        installer.remove(time.sleep)


def _leave_to_stay() -> None:
    """Look no more for cycles among what is there by now: that takes as long as twenty ADDs."""
    gc.collect()
    look_seldom()


def _node_backend(settings: Settings, workshop: Workshop) -> str:
    """Find out what `auto` means on this node; "" if it is not asked for, or cannot be found."""
    if settings.backend != "auto" or settings.native_nftables or settings.force_iptables_binary:
        return ""
    try:
        found = workshop.find_backend(lambda level, text: LOG.info("%s: %s", level, text))
    except IstioCNIError as error:
        LOG.warning("what works on this node cannot be found out, so each pod tries: %s", error.msg)
        return ""
    LOG.info("the back end on this node is %s", found)
    return found


def _serve_http(
    settings: Settings, output: log.Output, installer: Installer, metrics: Metrics, undo: ExitStack
) -> None:
    """Take the plugin's lines, and tell how things are, to the end. Raises IOFailure."""
    lines = Lines(output, metrics.plugin_line)
    undo.callback(PluginLog(settings.cni_agent_run_dir, lines).withdraw)
    HealthServer(settings.health_port, lambda: installer.missing)
    serve_monitoring(settings.monitoring_port, lambda: installer.missing, metrics.render)


def _follow_pods(
    settings: Settings, env: Mapping[str, str], metrics: Metrics, undo: ExitStack
) -> PodCache | None:
    """Begin to watch this node's pods, if its name is known."""
    if not settings.node_name:
        LOG.warning("NODE_NAME is not set: each pod is asked for when it starts")
        return None
    cache = PodCache(NodePods(settings.service_account_dir, env, settings.node_name))
    metrics.watch_cache(lambda: cache.size, lambda: cache.age_s)
    undo.callback(cache.stop)
    cache.start()
    return cache


def _serve_launcher(settings: Settings, shared: call.Node, undo: ExitStack) -> None:
    path = node.socket_path(settings)
    try:
        server = Server(path, lambda *called: call.answer(shared, *called))
    except IOFailure as error:
        LOG.error("the plugin is not served and does all by itself: %s", error.msg)
        return
    undo.callback(server.stop, FINISH_S)
