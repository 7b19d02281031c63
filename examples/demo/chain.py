"""A CNI chain, executed as a container runtime does it.

ADD goes from the first plugin to the last and hands each one's result to the next as `prevResult`;
CHECK goes the same way and DEL back, both with the final result. A plugin is a program that is
found by its `type` in CNI_PATH; it gets CNI_* variables, and its configuration on standard input.

Source: the CNI specification, sections 2 to 4.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import NamedTuple, TypeAlias

from .process import DemoFailed, run

JSON: TypeAlias = dict[str, object]


class Attachment(NamedTuple):
    """A pod's interface in a network: what the runtime knows of it."""

    container_id: str
    netns: str
    pod_namespace: str
    pod_name: str
    ifname: str = "eth0"


class Answer(NamedTuple):
    """What a plugin said: its exit status, its document, its log lines."""

    plugin: str
    status: int
    document: JSON
    log: list[JSON]

    @property
    def error(self) -> str:
        """The CNI error, "" after a success."""
        if self.status == 0:
            return ""
        code, msg = self.document.get("code"), self.document.get("msg")
        details = f" ({self.document['details']})" if self.document.get("details") else ""
        return f"{self.plugin}: code {code}: {msg}{details}"


class Chain:
    """One network: a configuration list and the directories in which plugins are looked for."""

    def __init__(self, conflist: JSON, search_path: str) -> None:
        self._path = search_path
        self._common = {key: conflist[key] for key in ("cniVersion", "name")}
        plugins = conflist["plugins"]
        if not isinstance(plugins, list):
            raise DemoFailed("the configuration list has no plugins")
        self._plugins: list[JSON] = plugins

    def add(self, attachment: Attachment) -> Answer:
        """Run ADD up to the first failure; the answer holds that, or the network's result."""
        result: JSON | None = None
        for plugin in self._plugins:
            answer = self.execute("ADD", plugin, attachment, result)
            if answer.status != 0:
                break
            result = answer.document
        return answer

    def check(self, attachment: Attachment, result: JSON) -> Answer:
        """Run CHECK; the first failure is the answer."""
        for plugin in self._plugins:
            answer = self.execute("CHECK", plugin, attachment, result)
            if answer.status != 0:
                break
        return answer

    def delete(self, attachment: Attachment, result: JSON | None) -> list[Answer]:
        """Run DEL, the last plugin first."""
        return [
            self.execute("DEL", plugin, attachment, result) for plugin in reversed(self._plugins)
        ]

    def repeat_last(self, attachment: Attachment, result: JSON) -> Answer:
        """Run ADD of the last plugin alone, upon the result that the chain had."""
        return self.execute("ADD", self._plugins[-1], attachment, result)

    def execute(
        self, command: str, plugin: JSON, attachment: Attachment, result: JSON | None
    ) -> Answer:
        """Run one plugin once."""
        kind = str(plugin["type"])
        program = shutil.which(kind, path=self._path)
        if program is None:
            raise DemoFailed(f"no CNI plugin {kind} in {self._path}")
        config = {**plugin, **self._common}
        if result is not None:
            config["prevResult"] = result
        env = {**os.environ, **self._environment(command, attachment)}
        done = run([program], stdin=json.dumps(config), env=env)
        log = [_log_line(line) for line in done.stderr.splitlines()]
        return Answer(kind, done.status, _document(kind, done.stdout), log)

    def _environment(self, command: str, attachment: Attachment) -> dict[str, str]:
        arguments = {
            "IgnoreUnknown": "1",
            "K8S_POD_NAMESPACE": attachment.pod_namespace,
            "K8S_POD_NAME": attachment.pod_name,
            "K8S_POD_INFRA_CONTAINER_ID": attachment.container_id,
        }
        return {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": attachment.container_id,
            "CNI_NETNS": attachment.netns,
            "CNI_IFNAME": attachment.ifname,
            "CNI_ARGS": ";".join(f"{key}={value}" for key, value in arguments.items()),
            "CNI_PATH": self._path,
        }


def _document(plugin: str, text: str) -> JSON:
    """Read a plugin's standard output: one JSON object or nothing."""
    if not text.strip():
        return {}
    try:
        document: JSON = json.loads(text)
    except ValueError as error:
        raise DemoFailed(f"{plugin} printed no JSON: {text[:80]!r}") from error
    return document


def _log_line(line: str) -> JSON:
    """Read a line of a plugin's standard error, which need not be JSON."""
    try:
        document = json.loads(line)
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {"msg": line}
