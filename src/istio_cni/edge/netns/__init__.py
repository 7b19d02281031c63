"""Network namespaces: open one, tell whose it is, run work inside it.

`namespace` knows what a namespace is and whether it is ours, `child` runs work in a process of its
own, `entry` is how that process gets inside, and what it sees there.
"""

from istio_cni.edge.netns.child import (
    Inside,
    collect,
    end,
    enter_sandbox,
    fork,
    outcome,
    run_inside,
    visit_and_report,
)
from istio_cni.edge.netns.entry import die_with_parent, leave, open_home, visiting
from istio_cni.edge.netns.namespace import (
    hold_apply_lock,
    identity,
    is_foreign,
    is_here_foreign,
    is_netns,
    open_netns,
)

__all__ = [
    "Inside",
    "collect",
    "die_with_parent",
    "end",
    "enter_sandbox",
    "fork",
    "hold_apply_lock",
    "identity",
    "is_foreign",
    "is_here_foreign",
    "is_netns",
    "leave",
    "open_home",
    "open_netns",
    "outcome",
    "run_inside",
    "visit_and_report",
    "visiting",
]
