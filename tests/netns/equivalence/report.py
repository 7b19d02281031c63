"""What a person needs to see a difference again, and to understand it.

A drawn configuration changes eight or nine settings, most of which have nothing to do with what was
found. So the report names seed and number, which repeat it exactly, and the settings are taken back
one by one for as long as the pods still disagree.
"""

from __future__ import annotations

import json

from .comparison import Difference, Run, kind_of, unexpected
from .configurations import PLAIN, Configuration
from .places import Ending, Settings
from .pods import Pod

BACK_ENDS = ("iptables", "nftables")
MOST_SHOWN = 12


def shrink(pods: tuple[Pod, Pod], difference: Difference) -> Configuration:
    """Take back settings to their defaults for as long as the pods disagree all the same."""
    run, found = Run(pods), difference.configuration
    probes = tuple(difference.endings)[:MOST_SHOWN]
    for key, default in PLAIN.items():
        fewer = found._replace(settings={**found.settings, key: default}, fresh=True)
        if fewer.settings == found.settings:
            continue
        failed = any(run.program(fewer))
        if failed if not probes else not failed and unexpected(fewer.settings, run.call(probes)):
            found = fewer
    return found


def beside_defaults(settings: Settings) -> dict[str, object]:
    """Return the settings that are not what a pod has anyway."""
    return {key: value for key, value in settings.items() if value != PLAIN[key]}


def report(difference: Difference, most: int = MOST_SHOWN) -> str:
    """Tell a person where the pods disagree, and how to see it again."""
    configuration = difference.configuration
    lines = [f"seed {configuration.seed}, number {configuration.number}:"]
    for back_end, failure in zip(BACK_ENDS, difference.failures, strict=True):
        if failure:
            lines.append(f"  {back_end} cannot program it: {failure.strip().splitlines()[-1]}")
    for probe, endings in [*difference.endings.items()][:most]:
        lines.append(f"  {probe}")
        lines += (
            f"    {name}: {_shown(end)}" for name, end in zip(BACK_ENDS, endings, strict=True)
        )
    if len(difference.endings) > most:
        lines.append(f"  and {len(difference.endings) - most} probes more")
    lines += (
        f"  iptables variant: {configuration.variant}",
        f"  settings for istio-iptables --config: {json.dumps(dict(configuration.settings))}",
        f"  once more: EQUIVALENCE_SEED={configuration.seed} "
        f"EQUIVALENCE_ONLY={configuration.number} "
        "pytest tests/netns/test_equivalence.py -k same_place",
    )
    return "\n".join(lines)


def _shown(ending: Ending) -> str:
    if isinstance(ending, str):
        return ending
    told = ", ".join(f"{name} {value}" for name, value in ending._asdict().items() if value)
    return f"{kind_of(ending)}: {told}"
